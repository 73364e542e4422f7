"""The commands: `jpipe train CONFIG`, `launch`, `plan`, `simulate`, `evaluate`, `export`, `generate`, `data …`,
`configs`, `completion`."""

import contextlib
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import tyro

from jpipe_train.console import interrupt
from jpipe_train.console.exit_codes import failed
from jpipe_train.console.terminal import LINES, fail, printable

app = tyro.extras.SubcommandApp()


@app.command
def train(
    config: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")],
    overrides: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
    plan: Annotated[str | None, tyro.conf.arg(metavar="FILE|auto")] = None,
    resume: Literal["auto", "must", "never"] = "auto",
    from_checkpoint: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    allow_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None,
    num_processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    process_id: Annotated[int | None, tyro.conf.arg(metavar="I")] = None,
    connect_limit: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 300.0,
    wait_limit: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 45.0,
    secret_file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
) -> int:
    """Train a model through a pipeline, as a YAML file says; in several processes, each is started with this command.

    Args:
        config: The YAML file, such as configs/gpt-bytes.yaml.
        overrides: Replace one key of the file, such as train.steps=100.
        plan: Train by this plan, as with plan.file; auto: find the best one for the devices that there are first.
        resume: Go on from the newest checkpoint in run.dir: where there is one (auto), in any case (must), or not at all (never).
        from_checkpoint: Go on from the checkpoint after so many steps in place of the newest; later ones are kept under other names.
        allow_code: Import and run the functions that the file names as module:function, from the current folder or installed packages.
        coordinator: Several processes: where process 0 is, the same for all. Under SLURM or Open MPI this and the next two are detected.
        num_processes: Several processes: how many.
        process_id: Several processes: the number of this one, from 0.
        connect_limit: Several processes: how long each waits for the others at the start.
        wait_limit: Several processes: how long none of them may get on before the run is given up; more than a microbatch takes.
        secret_file: Several processes: what they recognize each other by, the same for all; by default the variable JPIPE_SECRET.
    """
    with interrupt.held():  # this imports JAX, so it is not above: `--help` and typos are answered at once
        from jpipe_train.run import job
    interrupt.check()

    overrides = overrides if plan is None else (*overrides, f"plan.file={json.dumps(plan)}")
    address = job.Address(coordinator, num_processes, process_id, secret_file)
    return job.train(config, overrides, allow_code, resume, address, connect_limit, wait_limit, from_checkpoint)


LAUNCHED = "-- train CONFIG [--KEY …] | -- evaluate RUN [--KEY …]"
"""Long enough for the usage line to abbreviate the options of launch, which then stand before it, in the order in which one types them."""


@app.command
def launch(
    command: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar=LAUNCHED, help_behavior_hint="(required)")],
    num_processes: Annotated[int, tyro.conf.arg(aliases=["-n"], metavar="N")],
    pin: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    max_restarts: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
) -> int:
    """Start several processes on this machine, such as `jpipe launch -n 4 -- train configs/gpt-bytes.yaml`.

    When one process fails, or on Ctrl-C, all of them end.

    Args:
        command: The command of every process; the coordinator, the count and the number of the process are added to it.
        num_processes: How many processes.
        pin: Give each process a CPU core of its own, as far as there are enough. For measurements.
        max_restarts: How often to start all again when one fails; they go on from the newest checkpoint of their run folder.
    """
    from jpipe_train.launch import launch as launcher

    if wrong := launcher.problem(num_processes, command, pin=pin, max_restarts=max_restarts):
        return fail(printable(wrong), 2)
    return launcher.main(num_processes, command, pin=pin, max_restarts=max_restarts)


@app.command
def plan(
    config: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG]")] = None,
    overrides: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
    topology: Annotated[str, tyro.conf.arg(metavar="FILE|local")] = "local",
    profile: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    batch: Annotated[int | None, tyro.conf.arg(metavar="ROWS")] = None,
    up_to: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    rows: Annotated[int | None, tyro.conf.arg(metavar="ROWS")] = None,
    schedules: Annotated[str, tyro.conf.arg(metavar="NAME,NAME")] = "",
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    mesh: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="MESH|none")] = (),
    pipedream: Literal["batch", "replicas", "text", "code"] | None = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    profile_out: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    png: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    explain: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    allow_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Find the plan that trains a model fastest on given machines, and fits. Nothing is trained.

    Args:
        config: The YAML file of a run, such as configs/gpt-bytes.yaml; its plan is left aside.
        overrides: Replace one key of the config, such as model.depth=8.
        topology: The machines: a YAML file, such as configs/topologies/cluster-a.yaml, or local: the devices of this one.
        profile: What the layers cost, from --profile-out, or a graph.txt of the original PipeDream; by default profiled here.
        batch: Rows between two updates; by default the config's batch size.
        up_to: Fewer rows than that will do, where they train faster.
        rows: Of a microbatch of a graph.txt; by default 1.
        schedules: Only these, such as pipedream_2bw,pipedream_flush, or all. By default those that flush, which train as without a
            pipeline; under the others weights are delayed.
        devices: With local, how many to use; by default all, and on CPUs as many as there are cores.
        mesh: Only stages on meshes like this, such as model=4 or data=2,model=4,fsdp, or none: on one device each. May be given several
            times. By default meshes inside a server are tried for a topology from a file, if the model's logical axes allow them.
        pipedream: How PipeDream's stages update and are found: by default once a batch; or (replicas) after a microbatch of each replica,
            as in the original; or that by the recurrence of its paper, at the price of the text or of the released code, for comparison.
        out: Write the plan into this file, a JSON for plan.file.
        profile_out: Write the profile into this file.
        png: Draw throughput against memory of all candidates, and the balance of the stages, into this file.
        explain: Tell why the plan was chosen, which plans do not fit, and by how much.
        allow_code: Import and run the functions that a config names, as in train.
    """
    with interrupt.held():
        from jpipe import InputError, keep_freed_memory
        from jpipe_train.plan.plan import Files, main
        from jpipe_train.plan.planning import Request
    interrupt.check()

    keep_freed_memory()
    files = Files(config, profile, out, profile_out, png)
    request = Request(topology, batch, up_to, tuple(name for name in schedules.split(",") if name), devices, pipedream, meshes=mesh)
    try:
        main(files, request, overrides, rows=rows, explain=explain, allow_code=allow_code)
    except InputError as error:
        return failed(error)
    return 0


@app.command
def simulate(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PLAN|CONFIG")],
    overrides: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
    batches: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    png: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
    no_compile: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    allow_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """Show what a pipeline would do: timeline, bubble, weight versions and, for a config, bytes. Nothing is trained.

    Args:
        source: A plan's JSON file, or a YAML config such as configs/gpt-bytes.yaml.
        overrides: Replace one key of a config, such as plan.schedule=gpipe.
        batches: How many batches to show; by default enough to see the steady state.
        png: Draw the timeline into this file and, for a config, the memory into one next to it.
        no_compile: Do not compile the stages of a config, which takes seconds for small models and minutes for large ones; the temporaries
            of their programs, and so the peak memory, are then not known.
        allow_code: Import and run the functions that a config names, as in train.
    """
    with interrupt.held():
        import jpipe_train.plan.simulate as simulation
        from jpipe import InputError
    interrupt.check()

    try:
        shown = simulation.main(source, overrides, batches, png, allow_code=allow_code, compile=not no_compile)
    except InputError as error:
        return failed(error)
    print("\n".join(map(printable, shown.split("\n"))))
    return 0


@app.command
def evaluate(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    data: Annotated[str | None, tyro.conf.arg(metavar="PATH")] = None,
    step: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    weights: Literal["newest", "ema"] = "newest",
    batches: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    overrides: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
    allow_code: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
    coordinator: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT")] = None,
    num_processes: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    process_id: Annotated[int | None, tyro.conf.arg(metavar="I")] = None,
    connect_limit: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 300.0,
    wait_limit: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 45.0,
    secret_file: Annotated[str | None, tyro.conf.arg(metavar="FILE")] = None,
) -> int:
    """Find loss, perplexity and metrics of a run over whole data, through its pipeline. The run is not changed.

    Args:
        run: The folder of the run, such as runs/0001.
        data: All of these data, in the form of the run's own; by default all on which the run is validated.
        step: Of the checkpoint after so many steps; by default of the newest that is whole.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
        batches: Only so many; train.eval_batches of them are those of the run's own validations.
        overrides: Replace one key of the run's config, such as plan.num_stages=1.
        allow_code: Import and run the functions that the config names, as in train.
        coordinator: Several processes: as in train, and so are the following.
        num_processes: Several processes: how many.
        process_id: Several processes: the number of this one, from 0.
        connect_limit: Several processes: how long each waits for the others at the start.
        wait_limit: Several processes: how long none of them may get on before they give up.
        secret_file: Several processes: what they recognize each other by.
    """
    with interrupt.held():
        from jpipe_train.run import job
        from jpipe_train.run.evaluate import Request
    interrupt.check()

    address = job.Address(coordinator, num_processes, process_id, secret_file)
    request = Request(run, data, step, weights, batches, overrides, allow_code)
    return job.evaluate(request, address, connect_limit, wait_limit)


@app.command
def export(
    folder: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|CONFIG")],
    to: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE.safetensors|FOLDER]")] = None,
    out: Annotated[str | None, tyro.conf.arg(metavar="FILE.safetensors|FOLDER")] = None,
    step: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    weights: Literal["newest", "ema"] = "newest",
    layout: Literal["jpipe", "huggingface"] = "jpipe",
    overrides: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(name="set", metavar="KEY=VALUE")] = (),
) -> int:
    """Write the weights of a run into one file, for inference or for another run to begin with; or as transformers loads them.

    Args:
        folder: The folder of the run, such as runs/0001. With --layout huggingface also a config, for the weights that its run begins with.
        to: What to write, a new file. It holds the parameters and the layer state, by layer id and path. With --layout a new folder.
        out: The same as an option.
        step: Of the checkpoint after so many steps; by default of the newest that is whole.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
        layout: Hugging Face's (huggingface) is a folder with config.json and model.safetensors, for GPT-2, Llama and BERT.
        overrides: Replace one key of a config, such as model.preset=gpt2-124m.
    """
    with interrupt.held():
        import jpipe_train.checkpoint.export as exporting
        from jpipe import InputError
        from jpipe_train.checkpoint.huggingface import writing
    interrupt.check()

    try:
        if (to is None) == (out is None):
            raise InputError("export: expected the file or folder to write, once, such as --out gpt.safetensors")
        if overrides and not os.path.isfile(folder):
            raise InputError(f"--set {overrides[0]}: would mean nothing for a run; leave it out")
        place, report = to or out or "", lambda line: print(printable(line))
        if layout == "jpipe":
            exporting.main(folder, place, step, report, weights)
        else:
            writing.main(folder, place, step, report, weights, overrides)
    except InputError as error:
        return failed(error)
    return 0


@app.command
def generate(
    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FOLDER")],
    prompt: Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="TEXT")] = (),
    tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 100,
    temperature: Annotated[float | None, tyro.conf.arg(metavar="T")] = None,
    top_k: Annotated[int | None, tyro.conf.arg(metavar="K")] = None,
    top_p: Annotated[float | None, tyro.conf.arg(metavar="P")] = None,
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0,
    step: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    weights: Literal["newest", "ema"] = "newest",
    tokenizer: Annotated[str | None, tyro.conf.arg(metavar="FILE|bytes")] = None,
    devices: Annotated[int | None, tyro.conf.arg(metavar="N")] = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    as_json: Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(name="json")] = False,
) -> int:
    """Go on from a text with a model that was trained, and write what comes to standard output.

    Args:
        source: The folder of a run, such as runs/0001, or one in Hugging Face's layout, with config.json.
        prompt: The text to go on from; several times: of each. Without it standard input is read.
        tokens: At most so many come; fewer where the text ends, or the positions of the model do.
        temperature: 0: always the likeliest token; otherwise one is drawn, 1: as the model says. By default 1 with the next two, else 0.
        top_k: Draw one of the K likeliest tokens.
        top_p: Draw one of the likeliest tokens that have the probability P together, such as 0.9.
        seed: Of what is drawn.
        step: Of the checkpoint after so many steps; by default of the newest that is whole.
        weights: The newest parameters, or their moving average (ema), of a run with optimizer.ema_decay.
        tokenizer: A tokenizer.json in place of the model's own; bytes: each byte is a token.
        devices: Lay the layers on so many devices, one after the other; by default on as few as have the memory.
        dtype: In which the model computes; by default as in training, or as a folder's weights are.
        as_json: Write an object of JSON for each prompt in the end, with prompt, text, tokens and end.
    """
    with interrupt.held():
        from jpipe_train.generate import command
        from jpipe_train.generate import generate as generating
    interrupt.check()

    return command.run(
        generating.Request(source, prompt, tokens, temperature, top_k, top_p, seed, step, weights, tokenizer, dtype, devices, as_json)
    )


data = tyro.extras.SubcommandApp()
app.command(data, name="data", help="Make a tokenizer, or write text as files of tokens, to train on.")

Source = Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[SOURCE …]", help_behavior_hint="")]
Form = Annotated[Literal["auto", "text", "jsonl-text", "prompts"], tyro.conf.arg(name="format")]


@data.command
def prepare(
    source: Source = (),
    *,
    tokenizer: Annotated[str, tyro.conf.arg(metavar="FILE")],
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")],
    form: Form = "auto",
    validation_fraction: Annotated[float, tyro.conf.arg(metavar="F")] = 0.05,
    shard_tokens: Annotated[int, tyro.conf.arg(metavar="N")] = 100_000_000,
    end_of_text: Annotated[str, tyro.conf.arg(metavar="TOKEN|none")] = "auto",
    text_key: Annotated[str, tyro.conf.arg(metavar="KEY")] = "text",
    prompt_key: Annotated[str, tyro.conf.arg(metavar="KEY")] = "prompt",
    answer_key: Annotated[str, tyro.conf.arg(metavar="KEY")] = "answer",
) -> int:
    """Write text as a folder of tokens, for data.format: tokens. It appears whole or not at all.

    Args:
        source: Files, folders or globs to read; nothing: the source of Python's standard library.
        tokenizer: A tokenizer.json, which is copied into the folder; jpipe data tokenizer makes one.
        out: The folder, a new one.
        form: Each file is a text (auto: what seems to be none is refused); or (jsonl-text) each line is JSON with a text; or (prompts) with
            a prompt and an answer.
        validation_fraction: Share for validation: of several texts whole ones, of one text its end, of JSON lines those whose hash says so.
        shard_tokens: A file of tokens ends with the document that makes it as large as this.
        end_of_text: The token that ends each document; by default the one that the tokenizer has for it.
        text_key: Of a JSON line.
        prompt_key: Of a JSON line.
        answer_key: Of a JSON line.
    """
    with interrupt.held():
        from jpipe import InputError
        from jpipe_train.console.progress import Reporter
        from jpipe_train.data import prepare as preparing
        from jpipe_train.data.texts import Keys
    interrupt.check()

    files = preparing.Files(source, form, Keys(text_key, prompt_key, answer_key))
    end = None if end_of_text == "none" else end_of_text
    try:
        preparing.prepare(files, tokenizer, out, Reporter(1, 1, "bytes"), validation_fraction, shard_tokens, end)
    except InputError as error:
        return failed(error)
    return 0


@data.command(name="tokenizer")
def make_tokenizer(
    source: Source = (),
    *,
    vocab_size: Annotated[int, tyro.conf.arg(metavar="N")],
    out: Annotated[str, tyro.conf.arg(metavar="FILE")],
    form: Form = "auto",
    kind: Literal["decoder", "bert"] = "decoder",
    text_key: Annotated[str, tyro.conf.arg(metavar="KEY")] = "text",
    prompt_key: Annotated[str, tyro.conf.arg(metavar="KEY")] = "prompt",
    answer_key: Annotated[str, tyro.conf.arg(metavar="KEY")] = "answer",
) -> int:
    """Make a tokenizer from text: a byte-level BPE, which has a token for every byte, so for every text.

    Args:
        source: Files, folders or globs to read; nothing: the source of Python's standard library.
        vocab_size: How many tokens, at most.
        out: The tokenizer.json, a new file.
        form: As in jpipe data prepare.
        kind: Of the model: its special tokens are <|endoftext|>, or those of BERT.
        text_key: Of a JSON line.
        prompt_key: Of a JSON line.
        answer_key: Of a JSON line.
    """
    with interrupt.held():
        from jpipe import InputError
        from jpipe_train.console.progress import Reporter
        from jpipe_train.data import prepare as preparing
        from jpipe_train.data.texts import Keys
    interrupt.check()

    files = preparing.Files(source, form, Keys(text_key, prompt_key, answer_key))
    try:
        preparing.make_tokenizer(files, vocab_size, out, Reporter(1, 1, "bytes"), kind)
    except InputError as error:
        return failed(error)
    return 0


@app.command
def configs(
    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[copy [NAME …]]", help_behavior_hint="")] = (),
    to: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = ".",
    overwrite: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False,
) -> int:
    """List the configs and examples that come with jpipe, or copy them to where you are.

    Args:
        words: Nothing: list them. copy: copy all of them. copy NAME: only that one, such as gpt-bytes, with the Python files that it names.
        to: The folder that gets the folders configs and examples.
        overwrite: Replace existing files that differ.
    """
    from jpipe import InputError
    from jpipe.files import expanded
    from jpipe_train.config import shipped_configs

    try:
        if not words and (to != "." or overwrite):
            raise InputError("configs: --to and --overwrite are for copy; did you mean jpipe configs copy?")
        if not words:
            shipped_configs.list_all(print)
        elif words[0] == "copy":
            shipped_configs.copy(words[1:], expanded(to, "configs copy --to"), overwrite, lambda line: print(printable(line)))
        else:
            raise InputError(f"configs: expected nothing or copy, found '{words[0]}'; did you mean jpipe configs copy {words[0]}?")
    except InputError as error:
        return failed(error)
    return 0


@app.command
def completion(shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional, tyro.conf.arg(metavar="SHELL")]) -> int:
    """Print a script with which a shell completes these commands and their options; docs/configuration.md says where to put it.

    Args:
        shell: bash, zsh or fish.
    """
    with contextlib.suppress(SystemExit):  # how the library ends when it has printed it
        app.cli(prog="jpipe", args=["--tyro-print-completion", shell])
    if shell == "bash":
        print("complete -o default -F _tyro_jpipe jpipe  # names of files, too")
    return 0


NAMES = ("train", "launch", "plan", "simulate", "evaluate", "export", "generate", "data", "configs", "completion")
"""The commands, in the order of `jpipe --help`."""
GROUPS: Mapping[str, tuple[str, ...]] = {"data": ("prepare", "tokenizer")}
"""The commands that have commands of their own, with those."""


def names(group: str | None = None) -> tuple[str, ...]:
    """Return the names of all commands, or of those of a group."""
    return NAMES if group is None else GROUPS[group]


def unknown(arguments: Sequence[str]) -> str | None:
    """Return what is wrong with the command that is asked for, if there is no such command."""
    group, words = None, list(arguments)
    if words and words[0] in GROUPS:
        group = words.pop(0)
    if words and words[0].replace("_", "-").startswith("--tyro-"):  # of the library, which answers mistakes by tracebacks
        return f"unknown option {words[0]}; jpipe completion SHELL prints a script for a shell"
    if not words or words[0].startswith("-") or words[0] in names(group):
        return None
    from jpipe.errors import nearest, short

    where = "" if group is None else f"{group}: "
    return f"{where}unknown command {short(words[0])}; {nearest(words[0], names(group))}"


def run(arguments: Sequence[str] | None) -> int:
    """Run the command line `arguments` and return the exit code.

    Raises:
        SystemExit: the command line is wrong, or asks for help.
    """
    if wrong := unknown(sys.argv[1:] if arguments is None else arguments):
        sys.exit(fail(printable(wrong), 2))
    about = "Pipeline-parallel training for JAX and Flax. The version: jpipe --version."
    logging.getLogger("jpipe").addHandler(LINES)  # once, however often this is called
    code: int = app.cli(prog="jpipe", description=about, args=arguments)
    return code
