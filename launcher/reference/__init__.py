"""What can be set, for people: read from the typed settings and from `conf/`, so that it is true.

`choices` reads the files of `conf/`; `entries` makes one entry of each setting; `page` writes
docs/settings.md; `lookup` is `everstep settings`. `launcher.explain` asks `choices` where a setting
exists that is unknown here.
"""
