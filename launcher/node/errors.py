"""Finds in what a rank printed the error that a person would quote: in tracebacks as Python, rich
and loguru print them, in those of loaders, pools and groups, or else in its last words."""

import re
import unicodedata
from collections import namedtuple

BETWEEN = ("During handling of the above exception", "The above exception was the direct cause")
# A syntax error has frames and no header; so has a traceback whose beginning is lost.
HEADER = re.compile(
    r"(?P<box>╭─+ Traceback .*╮$)|Traceback \(most recent call last\):$|"
    r'^(?P<frame>  File ".*", line \d+(, in .*)?)$'
)
EXCEPTION = re.compile(r"( *[|│] )?(?P<quote>[^\W\d][\w.<>]*(\(\w+\))?(: .*|:|))$")
NAMED = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Warning)\b")
GROUP = re.compile(r".*\(\d+ sub-exceptions?\)$")
# These only report that another process failed, which mostly printed its own error before.
FOLLOWS = re.compile(
    r"[\w.]*(ChildFailedError|CalledProcessError|ProcessExitedException|BrokenProcessPool|"
    r"TerminatedWorkerError|BrokenPipeError|ConnectionResetError|EOFError|KeyboardInterrupt|"
    r"queue\.Empty)\b|RuntimeError: DataLoader worker .*exited unexpectedly"
)
# What libraries print around an error or as a process ends: no sign that the script went on.
FAREWELL = re.compile(
    r"\[?[IWE]\d{4} \d\d:|.{0,60}torch\.distributed\.elastic|(wandb|COMET \w+):|frame #\d+: |"
    r"\S+:\d+: \w*Warning: |.{0,200}\d%\|.*\||Exception in thread |Process \S+:$|"
    r".{0,60}(NCCL INFO |Child process with PID \d+ terminated)|.{0,200}Exception ignored |"
    r'During handling|The above exception|Set the environment variable HYDRA|[\s─│╭╮╰╯"]*$'
)
RECORD = re.compile(r".{0,80}?\b(?:DEBUG|INFO|WARNING|(ERROR|FATAL|CRITICAL|[Ee]rror:))(?:\W|$)")
# Launchers begin lines with the rank; torch with `[rank0]: ` those of the error that ends one.
PREFIX = re.compile(r"(\[rank\d+\]:\s?)|\[default\d+\]:|stderr: ")
HIDDEN = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x1b?|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
MOST_LINES, LONGEST = 5000, 2000  # lines of a stream, and bytes of each, that are looked at
QUOTED, BODY = 400, 30  # characters that are quoted, and lines that go with them
SAME_MOMENT = 0.2  # seconds; which of two streams was written first is not known more exactly

# `is_marked`: torch has begun it with the rank.
Line = namedtuple("Line", "text time is_marked")
# `quote` is the line that names it, `body` what belongs to it, in lines [begin, end) of a stream.
Error = namedtuple("Error", "begin end quote body")


def lines_of(pieces):
    """The last Lines of a stream, as a terminal shows them. `pieces`: [(when it came, bytes)]."""
    ended, rest, came = [], b"", 0.0
    for came, data in pieces:
        *whole, rest = (rest + data).split(b"\n")
        ended += [(line, came) for line in whole]
    lines = []
    for line, time in [*ended, (rest, came)][-MOST_LINES:]:
        visible = ([b""] + [part for part in line.split(b"\r") if part])[-1]  # of a progress bar
        text = HIDDEN.sub("", visible[:LONGEST].decode(errors="replace")).rstrip()
        prefix = PREFIX.match(text)
        text = text[prefix.end() :] if prefix else text
        lines.append(Line(text, time, bool(prefix and prefix.group(1))))
    return lines


def describe_ending(streams, failed):
    """What the Lines of a rank's stdout and stderr say about its end: the line to quote, what
    belongs to it, and what was printed after it, or without it. An exception that was not the last
    thing may have been handled: it counts only if the rank `failed`."""
    errors, others = [], []
    for stream, lines in enumerate(streams):
        found, plain = find_errors(lines)
        others += [(lines[place].time, stream, place) for place in plain]
        for error in found:
            last = lines[error.end - 1]
            errors.append((last.is_marked, last.time, stream, error))
    is_marked, ended, own, error = max(errors, default=(False, 0.0, 0, None))
    after = [
        streams[stream][place].text.strip(" │")[:QUOTED]
        for time, stream, place in sorted(others)
        if not error or (place >= error.end if stream == own else time > ended + SAME_MOMENT)
    ]
    # A record of an error says more than what is printed on the way out.
    words = after[-5:] if failed and not is_marked else []
    reported = [text for text in words if RECORD.match(text) and RECORD.match(text).group(1)]
    last_line = (reported or words or [None])[-1]
    if error and (failed or not after):
        return error.quote, error.body, last_line
    return None, [], last_line


def find_errors(lines):
    """The Errors in the Lines of a stream, without what only followed from another one, and the
    places of other output."""
    errors, plain, place = [], [], 0
    while place < len(lines):
        begin, header, match, width = place, HEADER.search(lines[place].text), None, 0
        place += 1
        text, text_before = lines[begin].text, lines[begin - 1].text if begin else ""
        is_source = text.startswith("  ") and "Warning: " in text_before
        if not header and not is_source and not FAREWELL.match(text):
            plain.append(begin)
        # Find the exception: the first line that is not indented, or the one below a box.
        while header and not match and place < len(lines):
            text, another = lines[place].text, HEADER.search(lines[place].text)
            if header.group("box"):
                match = EXCEPTION.match(text.strip()) if width else None
                width = width or width_of(text.strip()) * text.lstrip().startswith("╰")
            elif (another and not another.group("frame")) or (
                header.group("frame") and text[:1].strip() and not NAMED.match(text)
            ):
                break  # a stack that was printed without an exception
            else:
                match = EXCEPTION.match(text)
            place += 1
        if not match:
            continue
        error = read_message(lines, begin, place, match.group("quote"), width)
        place = error.end
        if plain[-1:] == [begin - 1]:
            plain.pop()  # a record that announces it
        if "Exception ignored " in text_before:
            continue
        before = errors[-1] if errors and errors[-1].end > max([-1, *plain[-1:]]) else None
        if before and FOLLOWS.match(error.quote) and not FOLLOWS.match(before.quote):
            errors[-1] = before._replace(end=error.end)
            continue
        if before and any(line.text.startswith(BETWEEN) for line in lines[before.end : begin]):
            causes = [*error.body, before.quote, *before.body]
            error = error._replace(body=causes[:BODY])
        errors.append(error)
    return errors, plain


def read_message(lines, begin, place, quote, width):
    """The Error whose exception stands before `place`, below a box of this `width`, if any."""
    # Add the lines that the message goes on with. rich breaks a line before a word that would not
    # fit, and within a word that is longer than a line.
    first, last, body = lines[place - 1], quote, []
    while place < len(lines) and len(body) < BODY and not GROUP.match(quote):
        line = lines[place]
        is_other = FAREWELL.match(line.text) or RECORD.match(line.text) or HEADER.search(line.text)
        is_later = line.time > first.time + SAME_MOMENT
        if is_other or is_later or line.is_marked != first.is_marked:
            break
        text = line.text.strip() if width else line.text
        if width and width_of(last) + width_of(text.split()[0]) >= width:
            is_cut = " " not in last and width_of(last) >= width - 1
            quote, last = quote + ("" if is_cut else " ") + text, text
        else:
            width = 0
            body.append(text)
        place += 1
    if quote.endswith(":") and body:
        quote += " " + body[0].strip()
    # Name the first exception of a group, and pass over the others.
    texts, is_group = [], GROUP.match(quote)
    while is_group and place < len(lines) and lines[place].text.lstrip()[:1] in "|+│╭╰":
        texts.append(lines[place].text.rstrip(" │"))
        place += 1
    parts = [match.group("quote") for match in map(EXCEPTION.match, texts) if match]
    quote = ": ".join([quote, *[part for part in parts if not GROUP.match(part)][:1]])
    return Error(begin, place, quote[:QUOTED], body)


def width_of(text):
    """The columns of a terminal that it takes."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
