# The verbs that a person types. Each hands its words on to one tool, which is where to read what it does. Which words a
# verb takes, and what `make help` says of it, is in contract/verbs.py, by which `known` refuses a mistake before anything
# starts.

PYTHON_ENV := .venv/bin/python
# What was typed after `make` is passed on literally, in the environment: neither make nor a shell expands it.
given := $(foreach name,$(.VARIABLES),$(if $(findstring command line,$(origin $(name))),$(name)))
$(foreach name,$(given),$(eval override $(name) := $$(value $(name))))
export $(given)
export TANDEM_GIVEN := $(given)
export TANDEM_VERBS := $(MAKECMDGOALS)
# For our programs, the words as they were typed: the shell puts each value in, and reads none of it.
words_of = $(foreach name,$(filter $(1),$(given)),"$(name)=$$$(name)")
words = $(call words_of,$(filter-out PYTHON,$(given)))
# For other tools, which have no such words, the options that the words stand for.
with_options = python3 -m tools.verbs run $@
# Where Ansible is: in .venv, or in the environment of an older one beside it (`known` lets only existing ones pass).
core := $(if $(filter CORE,$(given)),$(CORE))
ANSIBLE_ENV := .venv$(addprefix -core,$(core))
export PATH := $(CURDIR)/$(ANSIBLE_ENV)/bin:$(CURDIR)/.venv/bin:$(PATH)
# Ansible ends where the locale is not of UTF-8, or is not installed here, as one that ssh brought along.
export LC_ALL := C.UTF-8
# Its settings and plugins are this checkout's, whatever another project left in the shell, and where everybody may write
# to this folder, too, whose ansible.cfg Ansible then ignores unless it is named. Others, such as a vault's, are the user's.
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
unexport ANSIBLE_CALLBACK_PLUGINS ANSIBLE_COLLECTIONS_PATH ANSIBLE_COLLECTIONS_PATHS ANSIBLE_FILTER_PLUGINS
unexport ANSIBLE_HOST_KEY_CHECKING ANSIBLE_INVENTORY ANSIBLE_LIBRARY ANSIBLE_MODULE_UTILS ANSIBLE_ROLES_PATH
unexport ANSIBLE_STDOUT_CALLBACK ANSIBLE_VARS_PLUGINS
# It keeps files below HOME, which may be read-only.
ifneq ($(shell test -w "$$HOME" && echo yes),yes)
export ANSIBLE_HOME := $(CURDIR)/.tandem/ansible
endif

# Ansible hides the terminal from the programs it runs, so a progress bar needs the terminal's path.
terminal = "$$(tty | grep ^/dev/)"

.DEFAULT_GOAL := help
.PHONY: known machines help env ansible-env demo data/digits provision verify dry-provision check upgrade poweroff wake bootstrap bundle imagenet shrink find plan train dry-run slurm evaluate export status top attach stop runs report compare tensorboard sweep test test-lab test-all test-gpu snapshots lint bench bench-gpu lock

help:
	@python3 -m tools.verbs help

ifeq (help,$(firstword $(MAKECMDGOALS)))
$(filter-out help,$(MAKECMDGOALS)):
	@:
else

known:
	@python3 -m tools.verbs known

# An unknown verb.
.DEFAULT: ; @python3 -m tools.verbs known

env: known
	@tools/venv.sh control

ansible-env: env
	@$(if $(core),tools/venv.sh core$(core),:)

data/digits: env
	@$(PYTHON_ENV) examples/digits.py data/digits

# Refuses a list of machines with which a verb would do nothing and be content; what a sweep goes on with has its own.
machines: env
	@$(if $(filter FACTS RESUME,$(given)),:,$(PYTHON_ENV) -m launcher inventory $(call words_of,INVENTORY LIMIT))

demo: data/digits
	@$(PYTHON_ENV) -m launcher train INVENTORY=examples/demo.ini NODES=4 $(if $(filter EPOCHS,$(given)),,EPOCHS=20) $(words)

bundle: machines
	@$(if $(filter SCRIPT FOLDER REQUIREMENTS MODEL WEIGHTS,$(given)),$(PYTHON_ENV) -m launcher gather $(words),$(with_options) ansible-playbook ansible/playbooks/bundle.yml -e bundle_for_nobody=false -e bundle_terminal=$(terminal))


imagenet: env
	@tools/venv.sh imagenet
	@$(PYTHON_ENV) -m tools.imagenet $(words)

shrink: env
	@$(PYTHON_ENV) -m tools.shrink $(words)

export: env
	@tools/venv.sh torch
	@$(PYTHON_ENV) -m trainer.export $(words)

check: ansible-env machines
	@$(with_options) $(ANSIBLE_ENV)/bin/python ansible/check.py

bootstrap: ansible-env machines
	@$(with_options) $(ANSIBLE_ENV)/bin/python ansible/bootstrap.py

provision: ansible-env data/digits machines
	@$(with_options) ansible-playbook site.yml

dry-provision: machines
	@$(with_options) $(PYTHON_ENV) ansible/dry_provision.py

verify: ansible-env machines
	@$(with_options) ansible-playbook ansible/playbooks/verify.yml

upgrade: ansible-env data/digits machines
	@$(with_options) ansible-playbook ansible/playbooks/upgrade.yml

poweroff: ansible-env machines
	@$(with_options) ansible-playbook ansible/playbooks/poweroff.yml

wake: machines
	@$(with_options) $(PYTHON_ENV) ansible/wake.py

find plan train dry-run slurm evaluate status top attach stop runs: env
	@$(PYTHON_ENV) -m launcher $@ $(words)

report: env
	@$(PYTHON_ENV) -m report $(words)

sweep: machines
	@$(PYTHON_ENV) -m tools.sweep $(words)

tensorboard: env
	@tools/venv.sh tensorboard
	@$(PYTHON_ENV) -m tools.tensorboard $(words)

compare: env
	@$(PYTHON_ENV) -m report compare $(words)

test test-lab: known
	@$(with_options) tools/test.sh $@

test-all: known
	@python3 -m tools.all_tests $(words)

test-gpu: known
	@$(with_options) tools/test-gpu.sh

snapshots: known
	@tools/venv.sh dev
	@TANDEM_SNAPSHOTS=write $(PYTHON_ENV) -m pytest --quiet -k reviewed tests/messages tests/unit/ansible

lint: known
	@tools/venv.sh dev
	@tools/lint.sh

bench: known
	@tools/venv.sh dev
	@$(PYTHON_ENV) -m pytest --quiet -o faulthandler_timeout=14400 bench

bench-gpu: known
	@$(with_options) tools/test-gpu.sh bench

lock_311 := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header
lock: known
	$(lock_311) requirements/control.in --output-file requirements/control.txt
	$(lock_311) requirements/torch.in --output-file requirements/torch.txt --constraint requirements/control.txt
	$(lock_311) requirements/imagenet.in --output-file requirements/imagenet.txt --constraint requirements/torch.txt
	$(lock_311) requirements/tensorboard.in --output-file requirements/tensorboard.txt --constraint requirements/torch.txt
	$(lock_311) requirements/dev.in --output-file requirements/dev.txt --constraint requirements/control.txt --constraint requirements/torch.txt --constraint requirements/imagenet.txt
	uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header requirements/core2.16.in --output-file requirements/core2.16.txt
	uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-annotate --no-header requirements/core2.21.in --output-file requirements/core2.21.txt

endif
