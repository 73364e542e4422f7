"""Data of the models: folders of images, parallel text, running words, captions of videos."""
