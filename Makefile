# The verbs that a person types. Each calls one tool, which is where to read what it does. Which variables a verb takes,
# and what `make help` says of it, is in tools/verbs.py: its `known` refuses a mistake before anything starts, and its
# `run` passes the options that were typed on to the tool.

PYTHON_ENV := .venv/bin/python
# What was typed after `make` is passed on literally, in the environment: neither make nor a shell expands it.
given := $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))
$(foreach name,$(given),$(eval override $(name) := $$(value $(name))))
export $(given)
export TANDEM_GIVEN := $(given)
export TANDEM_VERBS := $(MAKECMDGOALS)
with_options = python3 tools/verbs.py run $@
# Where Ansible is: in .venv, or in the environment of an older one beside it (`known` lets only existing ones pass).
core := $(if $(filter CORE,$(given)),$(CORE))
ANSIBLE_ENV := .venv$(addprefix -core,$(core))
export PATH := $(CURDIR)/$(ANSIBLE_ENV)/bin:$(CURDIR)/.venv/bin:$(PATH)

# Ansible hides the terminal from the programs it runs, so a progress bar needs the terminal's path.
terminal = "$$(tty | grep ^/dev/)"

.DEFAULT_GOAL := help
.PHONY: known help env ansible-env demo data/digits provision verify dry-provision check upgrade poweroff wake bootstrap bundle usb imagenet accept plan train dry-run slurm status top attach stop runs report compare tensorboard sweep test test-lab test-all test-gpu snapshots mutants lint bench bench-gpu lock

help:
	@python3 tools/verbs.py help

ifeq (help,$(firstword $(MAKECMDGOALS)))
$(filter-out help,$(MAKECMDGOALS)):
	@:
else

known:
	@python3 tools/verbs.py known

# An unknown verb.
.DEFAULT: ; @python3 tools/verbs.py known

env: known
	@tools/venv.sh control

ansible-env: env
	@$(if $(core),tools/venv.sh core$(core),:)

data/digits: env
	@$(PYTHON_ENV) examples/digits.py data/digits

demo: data/digits
	@$(with_options) $(PYTHON_ENV) -m launcher train --inventory examples/demo.ini --nodes 4

bundle: env
	@$(with_options) $(if $(filter SCRIPT FOLDER REQUIREMENTS,$(given)),$(PYTHON_ENV) -m launcher gather,ansible-playbook ansible/playbooks/bundle.yml -e bundle_for_nobody=false -e bundle_terminal=$(terminal))

usb: env
	@$(with_options) ansible-playbook ansible/playbooks/usb.yml -e usb_terminal=$(terminal)

imagenet: env
	@$(with_options) $(PYTHON_ENV) tools/imagenet.py

check: ansible-env
	@$(with_options) $(ANSIBLE_ENV)/bin/python ansible/check.py

bootstrap: ansible-env
	@$(with_options) $(ANSIBLE_ENV)/bin/python ansible/bootstrap.py

provision: ansible-env data/digits
	@$(with_options) ansible-playbook site.yml

dry-provision: env
	@$(with_options) $(PYTHON_ENV) ansible/dry_provision.py

verify: ansible-env
	@$(with_options) ansible-playbook ansible/playbooks/verify.yml

upgrade: ansible-env data/digits
	@$(with_options) ansible-playbook ansible/playbooks/upgrade.yml

poweroff: ansible-env
	@$(with_options) ansible-playbook ansible/playbooks/poweroff.yml

wake: env
	@$(with_options) $(PYTHON_ENV) ansible/wake.py

accept: env
	@$(with_options) ansible-playbook ansible/playbooks/accept.yml

plan train dry-run slurm status top attach stop runs: env
	@$(with_options) $(PYTHON_ENV) -m launcher $@

report: env
	@$(with_options) $(PYTHON_ENV) -m report

sweep: env
	@$(with_options) $(PYTHON_ENV) -m tools.sweep

tensorboard: env
	@$(with_options) $(PYTHON_ENV) -m tools.tensorboard

compare: env
	@$(with_options) $(PYTHON_ENV) -m report compare

test test-lab test-all: known
	@$(with_options) tools/rings.py $@

test-gpu: known
	@$(with_options) tools/test-gpu.sh

snapshots: env
	@TANDEM_SNAPSHOTS=write $(PYTHON_ENV) -m pytest --quiet -k reviewed tests/messages tests/unit/ansible

mutants: known
	@tools/venv.sh dev
	@$(PYTHON_ENV) -m bench.mutants run

lint: known
	@tools/venv.sh dev
	@tools/lint.sh

bench: known
	@tools/venv.sh dev
	@$(PYTHON_ENV) -m pytest --quiet -o faulthandler_timeout=3600 bench --ignore=bench/verdict

bench-gpu: known
	@$(with_options) tools/test-gpu.sh bench

lock: known
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header requirements/control.in --output-file requirements/control.txt
	uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header requirements/dev.in --output-file requirements/dev.txt --constraint requirements/control.txt
	uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header requirements/core2.16.in --output-file requirements/core2.16.txt

endif
