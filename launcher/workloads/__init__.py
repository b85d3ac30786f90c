"""The kinds of workload, a file each (launcher/workload.py says what one is asked)."""

from contract.options import Config
from launcher.workload import Workload


def kind_of(config: Config) -> type[Workload]:
    """What these options ask for."""
    if config.script:
        from launcher.workloads.script import Script

        return Script
    from launcher.workloads.trainer import Trainer

    return Trainer
