"""What everything stands on: text, tables, users' code, this process."""
