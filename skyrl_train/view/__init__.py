"""`skyrl-view`: what a run did and does, in the browser, read from its folder and from nothing else.

    sources     which runs there are, and which files hold their rollouts
    importers   rollouts of older versions and of other trainers, as rows of the same columns
    rollouts    queries over all of them: DuckDB
    trajectory  one trajectory with what is known of each token
    records     everything else in a run's folder: metrics, timeline, settings, log
    answers     a request's path and arguments in, a JSON object out
    server      who may ask, and how; `export` puts answers and page into one file

A folder is only read: it is never opened for writing and never locked, and what vanishes or is half written while it is
looked at is named among the `problems` of an answer.
"""
