"""What each step leaves: metrics, responses, tokens and dumps."""
