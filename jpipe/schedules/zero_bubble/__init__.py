"""The schedules that split backwards and flush after each batch."""
