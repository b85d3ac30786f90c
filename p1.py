import re
def sub(path, *pairs):
    text=open(path).read()
    for old,new in pairs:
        assert text.count(old)==1,(path,old,text.count(old))
        text=text.replace(old,new)
    open(path,'w').write(text)
sub('launcher/plan/plan.py',
("from collections import Counter, defaultdict\n","from collections import Counter\n"),
('''    said; `extra_env` goes into each rank's environment. `independent`: each machine is a
    world of its own, and `timetables` (measure.py) say how it measures its links beforehand.
''' if False else '''plan` said; `extra_env` goes into each rank's environment. `independent`: each machine is a
    world of its own, and `timetables` (measure.py) say how it measures its links beforehand.
''','''plan` said; `extra_env` goes into each rank's environment.
'''),
('''    independent: bool = False
    timetables: dict[str, dict[str, Any]] = field(default_factory=dict)
''',''),
('''    weights = () if request.independent else request.balance.of(hosts)
''','''    weights = request.balance.of(hosts)
'''),
('''    """The machines' parts of a plan. In a measurement each is a world of its own, with a port of
    its own."""
    on_machine''','''    """The machines' parts of a plan."""
    on_machine'''),
('''    first, taken = 0, defaultdict[str, set[int]](set)  # ports, by machine
''','''    first = 0
'''),
('''        if request.independent:
            port = choose_port(own, None, taken[own.machine])
            taken[own.machine].add(port)
            place = (1, 0, part.processes, host.address, port)
''',''),
('''        first += 0 if request.independent else part.processes
''','''        first += part.processes
'''),
('''    if host.name in request.timetables:
        env["TANDEM_LINKS"] = json.dumps(request.timetables[host.name])
        figures = f"{output}/nodes/{host.name}/links.json"
        before = [host.env_python, "-m", "launcher.node.prepare", "links", figures]
''',''),
('''    """One attempt of a run, or of a measurement, in which each machine is a run of its own.
''','''    """One attempt of a run, or of a measurement (measure.py).
'''),
)
sub('launcher/measure.py',
('''        self.plan: Plan = make_plan(
            dataclasses.replace(checked, options=options),
            self.machines,
            run=self.folder.name,
            independent=True,
            timetables=tables,
        )
''','''        together = make_plan(
            dataclasses.replace(checked, options=options), self.machines, run=self.folder.name
        )
        self.plan = apart(together, self.machines.facts, tables)
'''),
('''STREAM = {"seconds"''','''def apart(plan: Plan, facts: dict[str, Facts], tables: dict[str, dict[str, Any]]) -> Plan:
    """The plan with each machine a world of its own, which measures its links beforehand."""
    nodes, taken = [], defaultdict[str, set[int]](set)  # ports, by machine
    for node in plan.nodes:
        own = facts[node.host]
        port = choose_port(own, None, taken[own.machine])
        taken[own.machine].add(port)
        world = {
            **{"--nnodes": 1, "--node_rank": 0},
            **{"--master_addr": node.address, "--master_port": port},
        }
        names = [word.partition("=")[0] for word in node.argv]
        argv = [f"{n}={world[n]}" if n in world else w for n, w in zip(names, node.argv)]
        env = dict(node.env)
        if node.host in tables:
            env["TANDEM_LINKS"] = json.dumps(tables[node.host])
            figures = f"{node.output}/nodes/{node.host}/links.json"
            argv = [argv[0], "-m", "launcher.node.prepare", "links", figures, *argv]
        ranks = tuple(range(len(node.ranks)))
        nodes.append(dataclasses.replace(node, ranks=ranks, argv=tuple(argv), env=env))
    return dataclasses.replace(plan, nodes=tuple(nodes))


STREAM = {"seconds"'''),
('''import dataclasses
import secrets
''','''import dataclasses
import json
import secrets
'''),
('''import time
from pathlib''','''import time
from collections import defaultdict
from pathlib'''),
('import Plan, interface','import Plan, choose_port, interface'),
)
sub('tests/unit/launcher/test_balance.py',('''def test_a_measurement_trains_on_whole_batches_and_equal_parts_are_said_to_nobody(ready):
    checked, _ = ready()
    made = checks.make_plan(checked, checked.machines, run="r", independent=True)
    assert weights(made) == [None] * 3 and made.balance == {}
    checked''','''def test_equal_parts_are_said_to_nobody(ready):
    checked'''))
