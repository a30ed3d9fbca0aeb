# One virtual environment, .venv, made on first use and reused after.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-unit test-dist test-fault soak properties check bench wheel docs tutorials clean

help:            ## show this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:[^#]*## /\t/'

# torchvision's wheel is built for a card. Beside a torch without one it cannot be imported, and whatever looks for it
# (transformers, torchmetrics) then fails too: it lies in a folder of its own, from which tests take its models and timm's.
TORCHVISION = $(BIN)/python -c "import torch; print('torchvision==0.%d.*' % (int(torch.__version__.split('.')[1]) + 15))"

# Any build of torch in this range serves; an environment that already has one keeps it.
$(STAMP): pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade "pip>=25.1"
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet --disable-pip-version-check "torch>=2.13,<2.14"
	$(BIN)/python -c "from importlib.metadata import version; print('torch==' + version('torch'))" > $(VENV)/torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(VENV)/torch.txt --editable ".[examples,postgresql,s3,kubernetes]" --group dev --group foreign
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(VENV)/vision "$$($(TORCHVISION))" timm
	touch $(STAMP)

setup: $(STAMP)  ## make .venv and install phalanx into it

quickstart: $(STAMP)  ## train a ResNet on real images with 2 processes
	$(BIN)/phalanx run -n 2 examples/resnet/train.py --data digits --layers 18 --width 16 --epochs 10 --lr 0.05 --global-batch 32

# Ranks wait for each other much of the time: three processes keep two cores busy. Real kills and freezes come last, beside
# the unit tests, which start no process: what waits for them must not wait for ranks of the rest of the suite too.
# Hundreds of processes import src and ranks the files of tests: where Python is told to keep no bytecode (PYTHONDONTWRITEBYTECODE), each would compile it.
RANKS  = "tests/dist/test_e*" "tests/dist/test_[f-k]*" "tests/dist/test_[l-o]*" "tests/dist/test_[p-r]*" \
         "tests/browser tests/dist/test_[s-z]*" "tests/dist/test_[a-d]*"
FAULTS_AND_UNIT = "tests/fault/test_[p-z]*" "tests/fault/test_[f-o]*" "tests/unit" "tests/fault/test_[a-e]*"

test: $(STAMP)   ## the whole suite, three processes at a time
	$(BIN)/python -m compileall -q src tests examples
	tests/side_by_side $(BIN)/python 3 $(RANKS); code=$$?; tests/side_by_side $(BIN)/python 3 $(FAULTS_AND_UNIT) && exit $$code

test-unit: $(STAMP)  ## pure parts, no process
	$(BIN)/python -m pytest tests/unit

test-dist: $(STAMP)  ## real ranks
	$(BIN)/python -m pytest tests/dist

test-fault: $(STAMP)  ## real kills
	$(BIN)/python -m pytest tests/fault

SEED   ?= 1
FAULTS ?= 200

soak: $(STAMP)   ## random faults in jobs of every kind: make soak SEED=1 FAULTS=200
	$(BIN)/python -m benchmarks.soak --seed $(SEED) --faults $(FAULTS)

properties: $(STAMP)  ## property tests with new random examples; make test draws the same every time
	$(BIN)/python -m pytest --hypothesis-profile=random -m hypothesis tests/unit

check: $(STAMP)  ## formatting, lint, types, layers
	$(BIN)/ruff format --no-cache --check .
	$(BIN)/ruff check --no-cache .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP)  ## every benchmark, against its peer
	$(BIN)/python -m benchmarks

.PHONY: bench-quick
bench-quick: $(STAMP)  ## every benchmark once and small: that it works, not what it measures
	$(BIN)/python -m benchmarks --quick

.PHONY: gpu
gpu: $(STAMP)    ## on a machine with a GPU: every gpu test and one-GPU benchmarks; writes benchmarks/results/gpu_*.md
	$(BIN)/python -m benchmarks.gpu

wheel:           ## an sdist, a wheel of this machine and its SBOM in dist/, tried in an empty environment
	PYTHON=$(PYTHON) .ci/wheel

# Minutes, most of them for the native core of the wheel and for torch: not part of CI, where tests/unit/test_first_hour.py
# reads the scripts, and other tests what the commands say. WHEEL=dist/phalanx-*.whl takes one that is there.
.PHONY: first-hour
first-hour: $(STAMP)  ## install the wheel in an empty environment and run the first hour of a new user, each step checked
	$(BIN)/python -m benchmarks.first_hour $(if $(WHEEL),--wheel $(WHEEL))

docs: $(STAMP)   ## regenerate the tables in docs/ that come from the code, and build the site in build/site
	$(BIN)/phalanx env --list --markdown > docs/settings.md
	$(BIN)/python -m phalanx.strategy.page docs/strategy.md
	$(BIN)/python docs/design/modules_page.py
	$(BIN)/python docs/man/man_page.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

tutorials: $(STAMP)  ## run the notebooks in docs/tutorials and write what they print
	$(BIN)/python docs/tutorials/run.py docs/tutorials/*.ipynb

clean:           ## remove what the commands above made
	rm -rf $(VENV) build log
