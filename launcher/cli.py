"""The command line of the launcher."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from contract import defaults
from contract.errors import UserError
from launcher import told
from launcher.options import Options, asks_for_help, trainer_help

USAGE_ERROR = 2
# A hint at anything less similar would be a guess.
NEAR = 0.66


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See `python -m launcher --help`.")


def parser() -> argparse.ArgumentParser:
    made = _Parser(prog="python -m launcher", description="Start and watch training runs.")
    verbs = made.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    for verb, text in (
        ("train", "start a run"),
        ("dry-run", "print what train would run"),
        ("slurm", "write the run as a batch script for Slurm"),
    ):
        _training(verbs.add_parser(verb, help=text, allow_abbrev=False))
    _planning(verbs.add_parser("plan", help="predict a run", allow_abbrev=False))
    for verb, text in (
        ("status", "the state of a run"),
        ("attach", "show a run that is under way"),
        ("stop", "end a run; its workers save first"),
    ):
        one = verbs.add_parser(verb, help=text, allow_abbrev=False)
        one.add_argument("run", nargs="?", default="latest", help="its id (default: the newest)")
    verbs.add_parser("runs", help="all runs, the newest first", allow_abbrev=False)
    machines = verbs.add_parser(
        "inventory", help="refuse a list of machines that cannot be used", allow_abbrev=False
    )
    machines.add_argument("--inventory", default=defaults.INVENTORY)
    machines.add_argument("--limit", help="names of machines or groups, with commas between")
    return made


def _training(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("--inventory", help="Ansible inventory (default: inventory.ini)")
    add("--nodes", type=int, help="the first N machines of group cluster (default: all)")
    add(
        "--model",
        help=f"as the trainer's (default: {defaults.MODEL}; with --data {defaults.MODEL_OF_DATA})",
    )
    add("--data", help=f"a name below data_root, or a path (default: {defaults.DATA})")
    add("--epochs", type=int, help="as the trainer's")
    add("--batch", type=int, help="images per step and node")
    add("--precision", help="as the trainer's")
    add("--sync", help="as the trainer's")
    add("--max-restarts", type=int, help="attempts after the first one (default: 0)")
    add("--min-nodes", type=int, help="continue with as few machines as this (default: all)")
    add("--port", type=int, help="of the rendezvous on node 0 (default: a free one)")
    add("--queue", action="store_const", const=True, help="wait for busy GPUs")
    add("--force", action="store_const", const=True, help="start although something is wrong")
    add("--keep", metavar="SIZES", help="most MiB kept of a file: log=256,steps=1024,...")
    add("--resume", metavar="RUN", help="continue this run; machines may change")
    add("--detach", action="store_true", help="run without the terminal; see attach, status, stop")
    add("trainer", nargs="*", help="after `--`: options of `python -m trainer`")


def _planning(verb: argparse.ArgumentParser) -> None:
    add = verb.add_argument
    add("--inventory", help="Ansible inventory (default: inventory.ini)")
    add("--nodes", type=int, help="up to how many machines (default: all)")
    add("--model", help=f"as the trainer's (default: {defaults.MODEL})")
    add("--data", help="measure with these images (default: none; without --model the digits)")
    add("--epochs", type=int, help="of the run that is predicted (default: 90)")
    add("--batch", type=int, help="images per step and node")
    add("--precision", help="as the trainer's")
    add("--sync", help="as the trainer's")
    add("--queue", action="store_const", const=True, help="wait for busy machines")
    add("--force", action="store_const", const=True, help="measure although something is wrong")
    add("--measure", action="store_true", help="measure although a run or a measurement exists")
    add("--run", help="predict from this run")
    add("--gpu", help="on paper, by published or estimated speeds: 2080ti, 3090 ...")
    add("--all", action="store_true", help="show each strategy and number of machines")
    add("--link", help="a network of this speed: 1gbit, 2.5gbit (default: as measured)")
    add("trainer", nargs="*", help="after `--`: options of `python -m trainer`")


def _predict(given: argparse.Namespace) -> int:
    from launcher import measure

    reports = ("epochs", "batch", "precision", "sync", "run", "gpu", "link")
    words = [f"--{name}={value}" for name in reports if (value := getattr(given, name)) is not None]
    words += ["--all"] if given.all else []
    if given.gpu:
        more = [
            f"--{name}={value}" for name in ("model", "nodes") if (value := getattr(given, name))
        ]
        return measure.on_paper(words + more)
    own = {
        k: v
        for k, v in vars(given).items()
        if k not in ("sync", "run", "gpu", "link", "all", "measure")
    }
    options = _new(argparse.Namespace(**own))
    if given.data is None and not (given.model is None and _names_no_model(given)):
        options = dataclasses.replace(options, data="")  # noise: no images were named
    return measure.plan(options, words, given.measure)


def _changes(given: argparse.Namespace) -> dict[str, Any]:
    """The options that were given; all others keep their defaults, or the values of the run."""
    own = {"verb", "detach", "resume"}
    values = {k: v for k, v in vars(given).items() if k not in own and v not in (None, [])}
    if "trainer" in values:
        values["trainer"] = tuple(values["trainer"])
    return values


def _new(given: argparse.Namespace) -> Options:
    """The options of a new run. A recipe, or a word after `--`, may name the model instead."""
    values = _changes(given)
    if _names_no_model(given):
        values["model"] = defaults.model(given.model, given.data)
    return Options(**values)


def _names_no_model(given: argparse.Namespace) -> bool:
    """Whether neither a word after `--` nor a recipe names a model."""
    return {word.partition("=")[0] for word in given.trainer}.isdisjoint({"--config", "--model"})


def _parse(argv: list[str]) -> argparse.Namespace:
    """What was typed. After `--` come the trainer's words for verbs that train, and elsewhere a
    run's name, which may begin with a dash. Raises UserError."""
    cut = argv.index("--") if "--" in argv else len(argv)
    made = parser()
    given, unknown = made.parse_known_args(argv[:cut])
    if unknown:
        raise UserError(_unknown(unknown[0], made, given.verb))
    if not hasattr(given, "trainer"):
        return made.parse_args(argv)
    if given.trainer:
        raise UserError(
            f"{given.trainer[0]!r} is no option: options of the trainer come after `--`."
        )
    given.trainer = argv[cut + 1 :]
    if given.model:
        from launcher.plan import models

        given.model = models.by_path(given.model)
    return given


def _unknown(word: str, made: argparse.ArgumentParser, verb: str) -> str:
    name = word.split("=")[0]
    verbs = next(a for a in made._actions if isinstance(a, argparse._SubParsersAction))
    known = list(verbs.choices[verb]._option_string_actions)
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
    hint = f" Did you mean {near[0]}?" if near else f" See `python -m launcher {verb} --help`."
    return f"unknown option {name}.{hint}"


def _carry_out(given: argparse.Namespace, argv: list[str]) -> int:
    # Fabric takes a quarter of a second to import; a mistyped option need not wait for it.
    from launcher import control
    from launcher.machines import inventory

    if hasattr(given, "inventory"):
        told.keep_machines(given.inventory or defaults.INVENTORY)
    if given.verb == "runs":
        return control.runs()
    if given.verb == "inventory":
        return inventory.refuse(Path(given.inventory), given.limit)
    if given.verb in ("status", "stop", "attach"):
        return {"status": control.status, "stop": control.stop, "attach": control.attach}[
            given.verb
        ](given.run)
    if given.verb == "plan":
        return _predict(given)
    return _train(given, argv)


def _train(given: argparse.Namespace, argv: list[str]) -> int:
    from launcher import control, run, slurm

    options = _new(given)
    if asks_for_help(options):
        return trainer_help()
    if given.verb == "slurm":
        return slurm.main(options)
    if given.verb == "dry-run":
        return run.dry_run(options)
    if given.detach:
        return control.detach(argv)
    if given.resume:
        return run.resume(given.resume, _changes(given))
    return run.train(options)


def _drop_output() -> None:
    """Discards what could not be printed: the interpreter would try again as it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def main(argv: list[str]) -> int:
    try:
        given = _parse(argv)
        code = _carry_out(given, argv)
        sys.stdout.flush()
        return code
    except UserError as error:
        for problem in error.problems:
            told.show(problem, sys.stderr)
        return USAGE_ERROR
    except BrokenPipeError:  # `| head` has seen enough
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is not None:  # it concerns a file: a defect, which needs its traceback
            raise
        _drop_output()
        print(f"tandem: the output cannot be printed: {error.strerror}", file=sys.stderr)
        return USAGE_ERROR
    except KeyboardInterrupt:
        print("tandem: interrupted; `make runs` shows what was begun", file=sys.stderr)
        return 130
