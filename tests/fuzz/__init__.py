"""A fuzzer of every file that we write and read again: seeded, and each finding is printed so that it can be repeated.

A mutation changes an intact file. Half of them change bytes, half change what the file says and *sign* it again with a
fresh digest, so that the checks behind the digest are tested, too. A file that is read must say what it said before or,
signed, what it says now, and that must be allowed: see `Mutation.must_refuse`. Everything else has to be refused in one
sentence that names the file: no traceback, no waiting, no memory beyond a few hundred megabytes.

    python -m fuzz --kind model --number 17 --seed 0        (in tests/; repeats one mutation)
    python -m fuzz --count 5000 --seed 1                    (a longer search)
"""
