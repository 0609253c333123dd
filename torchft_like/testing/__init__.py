"""The testing kit: a real job on one machine, faults in it, what it wrote down, and what must hold of that.

`cluster`: a lighthouse and replica groups that run a script; `lighthouse`: a lighthouse alone.
`ranks`: processes that do what a test asks of them; `processes`, `forks`: how processes start and end.
`faults`: faults at an exact place of a script; `relay`: of what a server answers.
`witness`, `journal`: what a rank writes down; `log`, `invariants`: what is read from that, and must hold.
`chaos`: the command that injects faults into a job for an hour, and reports.

It is for tests of programs that use this package, and for this package's own. No other part of the
library imports it. It needs `pip install 'torchft-like[testing]'`, chaos `'torchft-like[chaos]'`.
"""
