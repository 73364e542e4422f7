"""The command-line application and the options that several commands share."""

from typing import Annotated, Literal

import tyro

app = tyro.extras.SubcommandApp()

Count = Annotated[int, tyro.conf.arg(metavar="N")]
OptionalCount = Annotated[int | None, tyro.conf.arg(metavar="N")]
OptionalFile = Annotated[str | None, tyro.conf.arg(metavar="FILE")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Overrides = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")]
Weights = Literal["newest", "ema"]
Coordinator = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")]
ProcessId = Annotated[int | None, tyro.conf.arg(metavar="I")]
Seconds = Annotated[float, tyro.conf.arg(metavar="SECONDS")]
