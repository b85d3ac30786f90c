import ast,subprocess,collections,sys
files=subprocess.check_output("git ls-files 'ansible/*.py' 'contract/*.py' 'launcher/*.py' 'report/*.py' 'tandem/*.py' 'trainer/*.py' 'lab/*.py' 'tools/*.py' 'examples/*.py'",shell=True,text=True).split()
mods={f[:-3].replace('/','.'):f for f in files}
use=collections.defaultdict(set)
defs={}
allnames=collections.Counter()
for f in files+subprocess.check_output("git ls-files 'tests/*.py' 'bench/*.py'",shell=True,text=True).split():
    t=ast.parse(open(f).read())
    for n in ast.walk(t):
        if isinstance(n,ast.ImportFrom) and n.module:
            for a in n.names:
                for m in (n.module,f"{n.module}.{a.name}"):
                    if m in mods: use[m].add(f)
        elif isinstance(n,ast.Import):
            for a in n.names:
                if a.name in mods: use[a.name].add(f)
for m,f in mods.items():
    u=[x for x in use[m] if not x.startswith(('tests/','bench/'))]
    n=len(open(f).read().splitlines())
    if len(u)==1 and n<130: print(n,f,u, 'tests:',len(use[m])-len(u))
