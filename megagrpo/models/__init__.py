"""A Hugging Face model as facts (`families/`), as Megatron's blocks (`bridge/`), and as files with a card (`hub/`)."""
