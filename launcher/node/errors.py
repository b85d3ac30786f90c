"""Finds in a rank's output the error that a person would quote: in a traceback of Python, rich or
loguru, also of a loader, a pool or a group, or else in the last lines. workers.py calls
`describe_ending` when a rank has ended. tests/unit/launcher/test_errors.py has samples of all
forms."""

import re
import unicodedata
from collections import namedtuple

# Lines between the traceback of a cause and the traceback of its consequence.
BETWEEN = ("During handling of the above exception", "The above exception was the direct cause")
# The beginning of a traceback: rich's box, the header, or a frame. A syntax error has frames
# without a header, and so has a traceback whose beginning is lost.
HEADER = re.compile(
    r"(?P<box>╭─+ Traceback .*╮$)|Traceback \(most recent call last\):$|"
    r'^(?P<frame>  File ".*", line \d+(, in .*)?)$'
)
# The line that names the exception: `ValueError: no rows`, or `  | KeyError: 'x'`.
EXCEPTION = re.compile(r"( *[|│] )?(?P<quote>[^\W\d][\w.<>]*(\(\w+\))?(: .*|:|))$")
NAMED = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Warning)\b")  # the usual names
GROUP = re.compile(r".*\(\d+ sub-exceptions?\)$")  # `ExceptionGroup: two (2 sub-exceptions)`
# Errors that only report the failure of another process, which mostly printed an error before.
FOLLOWS = re.compile(
    r"[\w.]*(ChildFailedError|CalledProcessError|ProcessExitedException|BrokenProcessPool|"
    r"TerminatedWorkerError|BrokenPipeError|ConnectionResetError|EOFError|KeyboardInterrupt|"
    r"queue\.Empty)\b|RuntimeError: DataLoader worker .*exited unexpectedly"
)
# Lines of libraries around an error, or at a process's end. The script did not print them.
FAREWELL = re.compile(
    r"\[?[IWE]\d{4} \d\d:|.{0,60}torch\.distributed\.elastic|(wandb|COMET \w+):|frame #\d+: |"
    r"\S+:\d+: \w*Warning: |.{0,200}\d%\|.*\||Exception in thread |Process \S+:$|"
    r".{0,60}(NCCL INFO |Child process with PID \d+ terminated)|.{0,200}Exception ignored |"
    r'During handling|The above exception|Set the environment variable HYDRA|[\s─│╭╮╰╯"]*$'
)
# A line of a log: `12:00:01 ERROR: no rows`. The group is set if the line reports an error.
RECORD = re.compile(r".{0,80}?\b(?:DEBUG|INFO|WARNING|(ERROR|FATAL|CRITICAL|[Ee]rror:))(?:\W|$)")
# Prefixes of launchers. torch begins the lines of the error that ends a rank with `[rank0]: `.
PREFIX = re.compile(r"(\[rank\d+\]:\s?)|\[default\d+\]:|stderr: ")
# Sequences and control characters that a terminal does not show.
HIDDEN = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*\x1b?|[\x00-\x08\x0a-\x1f\x7f-\x9f]"
)
MOST_LINES, LONGEST = 5000, 2000  # the searched lines of a stream, and bytes of each line
QUOTED, BODY = 400, 30  # characters of a quote, and lines of its body
# Seconds. The guard reads the two streams in turn, so it knows their order only this exactly.
SAME_MOMENT = 0.2

# `time`: when the guard read the line; `is_marked`: the line began with `[rank0]: ` of torch.
Line = namedtuple("Line", "text time is_marked")
# `quote`: the line that names the error; `body`: further lines of its message; `begin`, `end`: the
# error takes the lines [begin, end) of its stream.
Error = namedtuple("Error", "begin end quote body")


def lines_of(pieces):
    """Return the last Lines of a stream, as a terminal shows them. `pieces`: [(time, bytes)]."""
    timed_lines, unfinished, read_time = [], b"", 0.0
    for read_time, data in pieces:
        *complete, unfinished = (unfinished + data).split(b"\n")
        timed_lines += [(line, read_time) for line in complete]
    lines = []
    for line, time in [*timed_lines, (unfinished, read_time)][-MOST_LINES:]:
        # A carriage return, as in a progress bar, lets later text overwrite earlier text.
        visible = ([b""] + [text for text in line.split(b"\r") if text])[-1]
        text = HIDDEN.sub("", visible[:LONGEST].decode(errors="replace")).rstrip()
        prefix = PREFIX.match(text)
        text = text[prefix.end() :] if prefix else text
        lines.append(Line(text, time, bool(prefix and prefix.group(1))))
    return lines


def describe_ending(streams, failed):
    """Return what the Lines of a rank's two `streams` say about its end: the line to quote or None,
    further lines of its message, and the last line after the error (or of all, without an error) or
    None. `failed`: the rank did not exit with code 0."""
    errors, plain_lines = [], []
    for stream, lines in enumerate(streams):
        stream_errors, plain_places = find_errors(lines)
        plain_lines += [(lines[place].time, stream, place) for place in plain_places]
        for error in stream_errors:
            end_line = lines[error.end - 1]
            errors.append((end_line.is_marked, end_line.time, stream, error))
    # The last error counts, unless there is a marked error, which certainly ended the rank.
    is_marked, error_time, error_stream, error = max(errors, default=(False, 0.0, 0, None))
    after = [
        streams[stream][place].text.strip(" │")[:QUOTED]
        for time, stream, place in sorted(plain_lines)
        if not error
        or (place >= error.end if stream == error_stream else time > error_time + SAME_MOMENT)
    ]
    # A line of a log with an error says more than other lines that a process prints as it ends.
    candidates = after[-5:] if failed and not is_marked else []
    records = [text for text in candidates if RECORD.match(text) and RECORD.match(text).group(1)]
    last_line = (records or candidates or [None])[-1]
    # If the rank succeeded and continued to print, it has handled the exception.
    if error and (failed or not after):
        return error.quote, error.body, last_line
    return None, [], last_line


def find_errors(lines):
    """Return the Errors in the Lines of a stream, without mere consequences of another error, and
    the indices of lines that are other output."""
    errors, plain, place = [], [], 0
    while place < len(lines):
        begin, header, match, width = place, HEADER.search(lines[place].text), None, 0
        place += 1
        text, text_before = lines[begin].text, lines[begin - 1].text if begin else ""
        is_source = text.startswith("  ") and "Warning: " in text_before
        if not header and not is_source and not FAREWELL.match(text):
            plain.append(begin)
        # Find the exception: the first line that is not indented, or the line below rich's box.
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
        # A line of a log just before the traceback announces the error, and is no other output.
        if plain[-1:] == [begin - 1]:
            plain.pop()
        if "Exception ignored " in text_before:
            continue
        # The previous error, if the script printed nothing else between the two errors.
        previous = errors[-1] if errors and errors[-1].end > max([-1, *plain[-1:]]) else None
        if previous and FOLLOWS.match(error.quote) and not FOLLOWS.match(previous.quote):
            errors[-1] = previous._replace(end=error.end)
            continue
        # Python prints the cause first, and quotes no other error than the last one.
        if previous and any(line.text.startswith(BETWEEN) for line in lines[previous.end : begin]):
            causes = [*error.body, previous.quote, *previous.body]
            error = error._replace(body=causes[:BODY])
        errors.append(error)
    return errors, plain


def read_message(lines, begin, place, quote, width):
    """Return the Error whose exception, `quote`, is in the line before `place`. `width`: columns of
    rich's box above the exception, 0 without a box."""
    # Add the lines with which the message continues. rich breaks a line before a word that does not
    # fit, and within a word that is longer than a line.
    quote_line, text_before, body = lines[place - 1], quote, []
    while place < len(lines) and len(body) < BODY and not GROUP.match(quote):
        line = lines[place]
        is_other = FAREWELL.match(line.text) or RECORD.match(line.text) or HEADER.search(line.text)
        is_later = line.time > quote_line.time + SAME_MOMENT
        if is_other or is_later or line.is_marked != quote_line.is_marked:
            break
        text = line.text.strip() if width else line.text
        if width and width_of(text_before) + width_of(text.split()[0]) >= width:
            is_cut = " " not in text_before and width_of(text_before) >= width - 1
            quote, text_before = quote + ("" if is_cut else " ") + text, text
        else:
            width = 0
            body.append(text)
        place += 1
    if quote.endswith(":") and body:
        quote += " " + body[0].strip()
    # Of a group, add the first exception to the quote, and skip the other exceptions.
    texts, is_group = [], GROUP.match(quote)
    while is_group and place < len(lines) and lines[place].text.lstrip()[:1] in "|+│╭╰":
        texts.append(lines[place].text.rstrip(" │"))
        place += 1
    members = [match.group("quote") for match in map(EXCEPTION.match, texts) if match]
    quote = ": ".join([quote, *[member for member in members if not GROUP.match(member)][:1]])
    return Error(begin, place, quote[:QUOTED], body)


def width_of(text):
    """Return the columns of a terminal that a text takes."""
    return sum(2 if unicodedata.east_asian_width(letter) in "WF" else 1 for letter in text)
