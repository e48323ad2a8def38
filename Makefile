.PHONY: setup demo test test-slow check bench

setup:      ## install everything for development
	scripts/setup check test train

demo:       ## serve the demo model, ask about two pictures, stop
	scripts/show_demo

test:       ## every test that takes seconds
	scripts/test

test-slow:  ## the tests that take minutes
	scripts/test -m slow

check:      ## format, lint, types, imports, generated stubs
	scripts/check

bench:      ## list the benchmarks
	scripts/bench
