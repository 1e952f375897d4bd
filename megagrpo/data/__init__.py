"""This room turns data sets into prompts, text into tokens, and samples into packed micro-batches."""
