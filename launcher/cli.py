"""The command line of the launcher."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import sys
from pathlib import Path
from typing import Any, NoReturn

from contract.errors import UserError
from contract.options import DEFAULT_INVENTORY, default_model
from launcher import terminal
from launcher.hours import moments
from launcher.options import Options, asks_for_help, trainer_help
from tools import verbs as table

USAGE_ERROR = 2
# A hint at anything less similar would be a guess.
NEAR = 0.66


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}. See `python -m launcher --help`.")


# The verbs of make that this program carries out.
VERBS = ("plan", "train", "dry-run", "slurm", "status", "top", "attach", "stop", "runs")


def parser() -> argparse.ArgumentParser:
    """One argument for each variable that tools/verbs.py has for a verb."""
    made = _Parser(prog="python -m launcher", description="Start and watch training runs.")
    verbs = made.add_subparsers(dest="verb", required=True, parser_class=_Parser)
    for name in VERBS:
        row = table.VERBS[name]
        assert row is not None  # as a heading is
        verb = verbs.add_parser(name, help=row.help, allow_abbrev=False)
        for variable in table.variables_of(name).values():
            _add(verb, variable)
    machines = verbs.add_parser(
        "inventory", help="refuse a list of machines that cannot be used", allow_abbrev=False
    )
    machines.add_argument("--inventory", default=DEFAULT_INVENTORY)
    machines.add_argument("--limit", help="names of machines or groups, with commas between")
    gather = verbs.add_parser(
        "gather", help="gather the packages of a script into bundle/", allow_abbrev=False
    )
    for variable in (table.INVENTORY, *table.PACKAGES):
        _add(gather, variable)
    return made


def _add(verb: argparse.ArgumentParser, variable: table.Variable) -> None:
    """An option is None unless it is given."""
    told = variable.help.removeprefix("1: ").replace("%", "%%")
    if variable.kind == "run":
        verb.add_argument("run", nargs="?", default="latest", help=told)
    elif variable.kind == "words":
        verb.add_argument("trainer", nargs="*", help=f"after `--`: {told}")
    elif variable.kind == "switch":
        verb.add_argument(variable.option, action="store_const", const=True, help=told)
    else:
        kind = int if variable.kind == "number" else str
        verb.add_argument(variable.option, type=kind, metavar=variable.name, help=told)


def _predict(given: argparse.Namespace) -> int:
    from launcher import measure

    reports = ("epochs", "batch", "precision", "sync", "run", "gpu", "link")
    words = [f"--{name}={value}" for name in reports if (value := getattr(given, name)) is not None]
    words += ["--all"] if given.all else []
    if given.gpu:
        more = [
            f"--{name}={value}" for name in ("model", "nodes") if (value := getattr(given, name))
        ]
        named = Options(data="", trainer=tuple(given.trainer)).asked("--optimizer")
        more += [f"--optimizer={named}"] if named else []
        return measure.on_paper(words + more)
    own = {
        k: v
        for k, v in vars(given).items()
        if k not in ("sync", "run", "gpu", "link", "all", "measure")
    }
    options = _new(argparse.Namespace(**own))
    if given.data is None and not (given.model is None and _names_no_model(given)):
        options = dataclasses.replace(options, data="")  # noise: no images were named
    return measure.plan(options, words, bool(given.measure))


def _changes(given: argparse.Namespace) -> dict[str, Any]:
    """The options that were given; all others keep their defaults, or the values of the run."""
    own = {"verb", "detach", "resume", "at", "until"}
    values = {k: v for k, v in vars(given).items() if k not in own and v not in (None, [])}
    return {**values, **moments(getattr(given, "at", None), getattr(given, "until", None))}


def _new(given: argparse.Namespace) -> Options:
    """The options of a new run. A recipe, or a word after `--`, may name the model instead."""
    values = _changes(given)
    if getattr(given, "script", None):
        return Options.of({**values, "data": ""})
    if _names_no_model(given):
        values["model"] = default_model(given.model, given.data)
    return Options.of(values)


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
    if hasattr(given, "script"):
        from launcher.plan import script

        script.check_together(vars(given))
        if given.script:
            given.script, given.folder = script.by_path(given.script, given.folder)
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
    from launcher.machines import inventory

    if hasattr(given, "inventory"):
        terminal.keep_machines(given.inventory or DEFAULT_INVENTORY)
    if given.verb == "inventory":
        return inventory.refuse(Path(given.inventory), given.limit)
    if given.verb == "gather":
        return _gather(given)
    if given.verb == "status":
        from launcher import status

        return status.status(given.run, bool(given.json))
    if given.verb == "top":
        from launcher import top

        return top.top(given.run, given.inventory or DEFAULT_INVENTORY)
    if given.verb in ("runs", "stop", "attach"):
        from launcher import control

        verb = getattr(control, given.verb)
        return verb() if given.verb == "runs" else verb(given.run)
    if given.verb == "plan":
        return _predict(given)
    return _train(given, argv)


def _gather(given: argparse.Namespace) -> int:
    from launcher.folders import relative
    from launcher.plan import checks, script

    script.check_together(vars(given))
    values = _changes(given)
    values["script"], values["folder"] = script.by_path(given.script, given.folder)
    folder = checks.gather(Options.of({**values, "data": ""}), terminal.Terminal())
    terminal.show(f"the packages of the script are in {relative(folder)}", sys.stdout)
    return 0


def _train(given: argparse.Namespace, argv: list[str]) -> int:
    from launcher import run

    options = _new(given)
    if not options.script and asks_for_help(options):
        return trainer_help()
    if given.verb == "slurm":
        from launcher import slurm

        return slurm.main(options)
    if given.verb == "dry-run":
        return run.dry_run(options)
    if given.detach:
        from launcher import control

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
            terminal.show(problem, sys.stderr)
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
