# The verbs a person types. Each is one line into a tool: read there for what it does.
#
#   NODES=4 MODEL=resnet50 DATA=imagenet EPOCHS=90 BATCH=64 (per node) PRECISION=O1 SYNC=allreduce
#   INVENTORY=inventory.ini LOGIN=anna KEEP_SUDO=1 (bootstrap) ARGS="any option of: .venv/bin/python -m trainer --help"
#   CORE=2.16 (an older Ansible, for check, bootstrap and provision of machines with Python 3.6: Ubuntu 18.04)
#   RUN=latest RESUME=<run> MAX_RESTARTS=3 MIN_NODES=2 DETACH=1 QUEUE=1 FORCE=1

PYTHON_ENV := .venv/bin/python
# Where Ansible is: .venv, or beside it the environment of an older one.
ANSIBLE_ENV := .venv$(if $(CORE),-core$(CORE))
export PATH := $(CURDIR)/$(ANSIBLE_ENV)/bin:$(CURDIR)/.venv/bin:$(PATH)

RUN ?= latest
# An option is passed on only when its variable was given: the tools own the defaults.
option = $(if $($(2)),$(1) '$($(2))')
flag = $(if $($(2)),$(1))
launch_options = $(call option,--inventory,INVENTORY) $(call option,--nodes,NODES) $(call option,--model,MODEL) \
	$(call option,--data,DATA) $(call option,--epochs,EPOCHS) $(call option,--batch,BATCH) \
	$(call option,--precision,PRECISION) $(call option,--sync,SYNC) $(call option,--resume,RESUME) \
	$(call option,--max-restarts,MAX_RESTARTS) $(call option,--min-nodes,MIN_NODES) \
	$(call flag,--detach,DETACH) $(call flag,--queue,QUEUE) $(call flag,--force,FORCE) \
	$(if $(ARGS),-- $(ARGS))

# Ansible hides the terminal from what it runs, so a progress bar needs its path.
terminal = "$$(tty | grep ^/dev/)"

.DEFAULT_GOAL := help
.PHONY: help env ansible-env demo data/digits provision verify dry-provision check bootstrap bundle usb imagenet accept plan train dry-run slurm status attach stop runs report test test-legacy test-long test-cores chaos lint bench lock

help: ## this list
	@awk -F ':.*## ' '/^[a-z -]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' Makefile

env: ## .venv with everything the control machine needs
	@tools/venv.sh control

ansible-env: env
	@$(if $(CORE),tools/venv.sh core$(CORE),:)

data/digits: env
	@$(PYTHON_ENV) examples/digits.py data/digits

demo: data/digits ## four local nodes train the digits: no root, no other machine
	@$(PYTHON_ENV) -m launcher train --inventory examples/demo.ini --nodes 4 $(if $(ARGS),-- $(ARGS))

bundle: env ## gather what machines without internet need
	ansible-playbook $(call option,--inventory,INVENTORY) ansible/playbooks/bundle.yml -e bundle_terminal=$(terminal)

usb: env ## an ssh server on a stick (TO=/media/anna/STICK RELEASES=jammy)
	ansible-playbook $(call option,--inventory,INVENTORY) ansible/playbooks/usb.yml -e usb_terminal=$(terminal) \
		$(if $(TO),-e usb_folder="\"$$(realpath -m '$(TO)')\"") -e usb_releases='"$(RELEASES)"'

imagenet: env ## class folders of ILSVRC2012 (SRC=folder of its archives)
	@$(PYTHON_ENV) tools/imagenet.py $(call option,--source,SRC) $(call option,--to,TO)

check: ansible-env ## say all that is wrong with the machines; changes nothing
	@$(ANSIBLE_ENV)/bin/python ansible/check.py $(call option,--inventory,INVENTORY) $(call flag,--json,JSON)

bootstrap: ansible-env ## let this control machine into new machines (LOGIN=a user there with sudo)
	@$(ANSIBLE_ENV)/bin/python ansible/bootstrap.py $(call option,--inventory,INVENTORY) $(call option,--login,LOGIN) \
		$(call flag,--keep-sudo,KEEP_SUDO)

provision: ansible-env data/digits ## make the machines of inventory.ini a cluster
	ansible-playbook $(call option,--inventory,INVENTORY) site.yml

dry-provision: env ## print what `make provision` would install where (FACTS=examples/machines/... or the inventory)
	@$(PYTHON_ENV) ansible/dry_provision.py $(call option,--inventory,INVENTORY) $(call option,--facts,FACTS)

verify: ansible-env ## is what `make provision` made still so? changes nothing
	ansible-playbook $(call option,--inventory,INVENTORY) ansible/playbooks/verify.yml

accept: env ## measure every pair of machines: bandwidth, latency, MTU, disks
	ansible-playbook $(call option,--inventory,INVENTORY) ansible/playbooks/accept.yml

plan: env ## predict the next run before it is started
	@$(PYTHON_ENV) -m report plan $(call option,--nodes,NODES) $(call option,--model,MODEL) \
		$(call option,--sync,SYNC) $(ARGS)

train: env ## start a run on NODES machines
	@$(PYTHON_ENV) -m launcher train $(launch_options)

dry-run: env ## print exactly what `make train` would run on each machine
	@$(PYTHON_ENV) -m launcher dry-run $(launch_options)

slurm: env ## write the same run as a batch script for a Slurm cluster
	@$(PYTHON_ENV) -m launcher slurm $(launch_options)

status attach stop: env ## of the newest run, or RUN=...
	@$(PYTHON_ENV) -m launcher $@ $(RUN)

runs: env ## all runs, the newest first
	@$(PYTHON_ENV) -m launcher runs

report: env ## make the report of RUN again from its files
	@$(PYTHON_ENV) -m report runs/$(RUN)

test: ## lint, unit, training and lab tests (the last need root)
	@tools/test.sh

test-legacy: ## the CUDA 10.2 stack on Debian 11: trainer's tests and whole runs (root)
	@tools/test.sh legacy

test-long: ## lab tests of several minutes a file (root)
	@tools/test.sh long

test-cores: ## every playbook and its unit tests by both Ansibles
	@tools/venv.sh dev
	@tools/cores.sh

chaos: ## 40 faults in random order on a lab of four machines, five more with the real trainer (root)
	@tools/test.sh chaos

lint: ## every linter
	@tools/venv.sh dev
	@tools/lint.sh

bench: ## figures with their method: tests/bench/README.md (root)
	@tools/test.sh bench

lock: ## make requirements/*.txt anew from *.in (needs uv)
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header requirements/control.in --output-file requirements/control.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header requirements/dev.in --output-file requirements/dev.txt --constraint requirements/control.txt
	uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header requirements/core2.16.in --output-file requirements/core2.16.txt
