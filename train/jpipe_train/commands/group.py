"""Commands that share a first word."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class Group:
    """Commands that share a first word, such as `jpipe data prepare` and `jpipe data show`.

    Attributes:
        about: the help text of the group.
        commands: the function of each command; the keys are the second words.
    """

    about: str
    commands: Mapping[str, Callable[..., int]]

    def application(self) -> tyro.extras.SubcommandApp:
        """Return the tyro application with these commands."""
        app = tyro.extras.SubcommandApp()
        app.__doc__ = self.about
        for name, function in self.commands.items():
            app.command(name=name)(function)
        return app
