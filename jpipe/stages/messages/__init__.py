"""Messages with fewer bits: arrays are compressed where they are sent, and decompressed where they are received."""
