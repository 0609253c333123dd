"""Tests of the chaos engine: it injects faults into real jobs, and judges what they do."""
