"""The testing kit: a real job on one machine, faults in it, its records, and the invariants that they must
keep.

`cluster`: a lighthouse and replica groups that run a script; a lighthouse alone.
`ranks`: processes that run calls for a test; `processes`, `forks`: how processes start and end.
`faults`: faults at an exact place of a script; `relay`: faults in a server's answers.
`training`: a model that a rank trains, and a transport whose answers a fault can strike.
`journal`: the records of a rank; `log`, `invariants`: reading and checking them.
`chaos`: the command that injects faults into a job for an hour, and reports.

It is for tests of programs that use this package, and for this package's own. No other part of the
library imports it. It needs `pip install 'torchft-like[testing]'`, chaos `'torchft-like[chaos]'`.
"""
