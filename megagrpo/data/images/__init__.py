"""Images of prompts and their processors."""
