"""What a person sees of a run, while it lives and after it: from its records, without torch.

`records` reads what a run left, however damaged; `timeline` makes attempts of it; `goodput` says
where the wall time went; `status` puts it on one screen, `report` on a page with figures.
"""
