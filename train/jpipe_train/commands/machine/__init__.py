"""Commands about machines: their devices, and checks before a job starts on them."""
