"""The words that instances are named with. None is a keyword, a builtin, or a module of the standard library."""

WORDS = tuple(
    """
    account amount angle apple area arrow badge balance band bank basket beam bench bird board boat bonus book border bottle bound box
    branch bread bridge bucket budget button cable camera candle card cargo cart chain chair charge city cloud coin color corner cost
    cotton count cover crate credit cup deal debt delay deposit depth desk discount distance door drum edge engine entry factor farm fee
    field figure fine flag fleet floor flow flower forest frame freight fuel garden gate gift glass goal grade grain group guest hall
    height hill hotel hour house income island item jacket label ladder lake lamp layer leaf lemon level limit load loan margin market
    mass meter mile mirror month motor offer office orange order page paint paper parcel path payment people pepper piece pipe place
    plane planet plant plate point price prize profit pump rain rate ratio rent river road roof room route salary score season seat
    share shelf ship shop size speed stage station step stock stone store street sugar tax ticket tide tool tower town train tree trip
    truck unit volume wage wall water weight wheel width window year yard zone
    """.split()  # noqa: SIM905
)
