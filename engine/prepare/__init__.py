"""Making token files: ``everstep-data prepare`` turns text into Megatron pairs.

    inputs      which documents there are, and reading them
    encoders    a document's text -> tokens
    plan        the work in parts, fixed before it begins: what makes it restartable
    part        one part: documents -> one pair of files; run in a worker process
    prepare     the whole: the folder under way, the workers, the rename at the end

Uses the formats of `engine.stream.files`; nothing in `engine` needs it.
"""
