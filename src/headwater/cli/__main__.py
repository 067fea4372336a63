"""`python -m headwater.cli`, for where the console script is not on the PATH."""

from headwater.cli import main

main()
