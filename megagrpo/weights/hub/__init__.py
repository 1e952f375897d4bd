"""Model cards of exported models and adapters, and their upload to the Hugging Face hub."""
