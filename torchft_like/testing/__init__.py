"""The testing kit: a real job on one machine, faults in it, what it wrote down, and what must hold of that.

It is for tests of programs that use this package, and for this package's own. No other part of the
library imports it. It needs `pip install 'torchft-like[testing]'`.
"""
