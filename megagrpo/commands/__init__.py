"""One file per subcommand of `megagrpo`: its usage text, and what it runs."""
