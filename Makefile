.PHONY: help setup demo test test-slow check bench train-demo eval-demo dynamo
python = .venv/bin/python

help:        ## this list
	@sed -n 's/^\([a-z-]*\): *## /\1\t/p' Makefile | expand -t 14

setup:       ## install everything for development
	@scripts/setup check test train guided

demo:        ## encoder, prefill and decode engines, two questions about pictures, a clean end
	@scripts/setup
	@$(python) scripts/show_demo

test:        ## every test that takes seconds
	@scripts/test

test-slow:   ## the tests that take minutes
	@scripts/test -m slow

check:       ## format, lint, types, imports, generated stubs
	@scripts/check

bench:       ## list the benchmarks
	@scripts/bench

train-demo:  ## train the demo model from nothing (hours)
	@scripts/setup train
	@$(python) scripts/train_demo

eval-demo:   ## held-out accuracy of the demo model, per kind
	@scripts/setup train
	@$(python) scripts/eval_demo

dynamo:      ## NVIDIA Dynamo's own client against the engine (fetches it: 75 MB)
	@scripts/setup guided
	@$(python) scripts/dynamo
