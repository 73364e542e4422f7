"""The command-line application."""

import tyro

app = tyro.extras.SubcommandApp()
