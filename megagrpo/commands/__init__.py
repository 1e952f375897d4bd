"""The subcommands of `megagrpo`, one file each: its usage text and its main function."""
