"""Commands below one name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import tyro


@dataclass(frozen=True)
class Group:
    """Commands below one name, such as `jpipe data prepare` and `jpipe data show`.

    Attributes:
        about: the help of the group.
        commands: their functions, by name.
    """

    about: str
    commands: Mapping[str, Callable[..., int]]

    def application(self) -> tyro.extras.SubcommandApp:
        """Return these commands for tyro."""
        app = tyro.extras.SubcommandApp()
        app.__doc__ = self.about
        for name, function in self.commands.items():
            app.command(name=name)(function)
        return app
