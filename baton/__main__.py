from baton.main import main

main()
