"""Power limits of NVIDIA cards, and whether the cards stay initialised. Pure functions."""

import math

from . import PlanError

# The query for `nvidia-smi --query-gpu=... --format=csv,noheader,nounits`: one line per card.
QUERY = "name,power.min_limit,power.max_limit,power.limit,persistence_mode"


def power_plan(host, persistence, watts, printed):
    """{"persistence": bool, "watts": int, "wrong": [what is not so now]}.

    persistence, watts: the settings; 0 watts leaves NVIDIA's own limit. A limit is lost when the
    last program leaves a card that does not stay initialised, so a limit implies persistence.
    printed: the answer to QUERY. Raises PlanError if a card does not accept the limit.
    """
    watts = int(watts)
    persistence = bool(persistence) or watts > 0
    wrong = []
    for name, least, most, limit, mode in _rows(printed):
        if watts and None in (least, most):
            raise PlanError(
                f"{host}: the power of its {name} cannot be limited (nvidia-smi says N/A): write "
                "driver_power_limit_watts=0 into its line of inventory.ini"
            )
        if watts and not least <= watts <= most:
            raise PlanError(
                f"{host}: driver_power_limit_watts is {watts}, but its {name} accepts {least:.0f} "
                f"to {most:.0f} W. Change it in group_vars/all.yml, or for this machine in its "
                "line of inventory.ini"
            )
        if watts and (limit is None or round(limit) != watts):
            wrong.append(f"the limit of its {name} is {limit} W")
        if persistence and mode != "Enabled":
            wrong.append(f"its {name} is not kept initialised")
    return {"persistence": persistence, "watts": watts, "wrong": wrong}


def _rows(printed):
    """(name, least, most, limit, mode) of each card; watts are None if it reports N/A."""
    for line in printed.splitlines():
        words = [word.strip() for word in line.rsplit(",", 4)]
        if len(words) == 5:
            yield (words[0], *map(_watts, words[1:4]), words[4])


def _watts(text):
    try:
        watts = float(text)
    except ValueError:
        return None
    return watts if math.isfinite(watts) else None
