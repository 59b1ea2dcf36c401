"""How a staged save becomes a committed checkpoint, and how one attempt takes over from another.

Everything here works on names in one shared directory, with the standard library alone, so that the
writer process and the tools can use it without torch. Two rules hold in every module:

* Every decision is one rename of a directory entry onto an absent name. Whoever's rename succeeds
  has decided; everybody else finds the source gone or the name taken, and looks at what is there.
* A name is never tested for absence. Network file systems cache absence: a listing is forced fresh
  by a change of our own in that directory, and only what was listed is opened.

The modules, in the order of an attempt's life: `layout` (names and paths), `owner` (who a process
is), `acquire` (take the next attempt number), `adoption` (of whole saves that older attempts left),
`takeover` (what to continue from), `history` (which tags a run descends from), `commit` (the
rename), `local` (saves that are on the nodes' own disks first), `retention` (what may go).
"""
