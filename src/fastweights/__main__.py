"""python -m fastweights"""

from fastweights.cli.main import main

main()
