"""The commands about text: `jpipe generate`, `jpipe data`."""
