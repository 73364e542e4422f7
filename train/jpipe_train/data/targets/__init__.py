"""Data of the built-in targets: folders of images, parallel text, running words, captions."""
