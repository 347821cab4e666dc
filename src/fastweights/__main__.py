"""python -m fastweights"""

from fastweights.cli import main

main()
