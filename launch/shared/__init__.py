"""What several commands use; nothing here knows a command."""
