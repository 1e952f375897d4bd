"""Parts of tables and readers of config.json that several families use."""
