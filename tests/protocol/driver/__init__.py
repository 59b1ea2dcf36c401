"""The driver: chains of attempts in one checkpoint directory, killed at random moments.

It runs the product's own protocol, writers and hand-over; only the training is a stand-in, whose
bytes say which save they belong to (`content`). `trainer` is one rank's process, `ranks` starts and
kills those of one attempt, `events` is what they tell. `chain` goes from attempt to attempt: draws
`faults`, keeps `promises`, and has `inspect` read the directory.

Faults come after random delays: that is the fault model. Readiness is waited for, never guessed.

    python -m tests.protocol.driver --attempts 300 --seed 7 [--zombies] [--local]
"""
