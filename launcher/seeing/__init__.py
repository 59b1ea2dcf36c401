"""What a person sees of a run, while it lives and after it: from its records, without torch.

`records` reads what a run left, however damaged and however long, line by line (`lines`) and into
`columns`; `timeline` makes attempts of it; `goodput` says where the wall time went; `status` puts
it on one screen, `report` on a page with figures. What is read is specified in docs/records.md.
"""
