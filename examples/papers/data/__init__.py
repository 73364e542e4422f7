"""Data for the papers' models: folders of images, parallel text, running words, captions of videos."""
