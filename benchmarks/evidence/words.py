"""Adjectives and nouns that the keys of hidden facts are made of.

RULER draws them from the lists of the package wonderwords; these are the project's own.
"""


def _words(text: str) -> list[str]:
    return text.split()


ADJECTIVES = _words("""
able ample ancient arctic autumn awake azure bitter blunt bold brave brief bright brisk broad
bronze calm candid careful cheerful clean clear clever cloudy coastal cold cool copper cosmic
cozy crisp curious curly daring dark deep dense distant double dusty eager early eastern elastic
electric empty faint fair fancy fast fearless fierce final flat floral fond formal frank free
fresh frosty frozen gentle giant glad glossy golden grand grateful gray green happy harsh hasty
heavy hidden hollow honest humble icy idle inner ivory jolly keen kind large lazy light little
lively lone long loud loyal lucky magic marble mellow merry mighty mild misty modern modest
narrow neat nimble noble northern odd olive open orange outer pale patient plain playful polite
proud purple quick quiet rapid rare ready red remote rich robust rough round royal rustic sandy
scarlet secret serene shallow sharp shiny short shy silent silver simple sleepy slow small
smooth snowy soft solar solid southern spare steady steep stiff still stormy strong sudden sunny
sweet swift tall tame tender thick thin tidy tiny tough tranquil true upper vast velvet violet
vivid warm wary western white wide wild windy winter wise witty wooden woolen yellow young zesty
""")

NOUNS = _words("""
acorn alley anchor anvil apple apron arch arrow attic badge bakery balcony ballad bamboo banjo
banner barley barn basin basket beacon beaver bell bench berry bicycle blanket blossom boat
bonnet bottle boulder bowl branch brick bridge broom brush bucket buckle bundle butter button
cabin cactus camera canal candle canoe canvas canyon carpet carrot castle cavern cedar cellar
chain chalk chapel cherry chest chimney cinder circle clock cloud clover coach compass copper
coral corner cottage cradle crane crater crown curtain cushion dagger daisy desert diary dolphin
donkey drawer drum eagle easel echo ember engine falcon feather fence fiddle field flag flame
flute forest fork fountain fox garden garnet gate geyser glacier glove goblet grain granite
grape grove guitar hammer harbor harvest hazel hedge helmet heron hill hinge honey horizon
island jacket jar jewel jungle kettle key kite ladder lagoon lake lantern lattice leaf ledger
lemon letter library lily locket loom maple market marsh meadow medal melody mill mirror
monument moss mountain napkin needle nest oar oasis orchard otter oven owl paddle palace paper
parcel parrot pasture path pebble pencil pepper piano pillow pine pirate planet plaza plum
pocket pond poppy porch portrait prairie puddle puzzle quarry quilt rabbit raft ribbon river
robin rocket rope rudder saddle sail sandal school shelf shell shovel signal sketch sparrow
spoon spring stable statue stream summit sunset table teapot temple thimble thunder ticket
timber tower trail train treasure trumpet tulip tunnel turnip valley vase village violin wagon
wallet walnut waterfall wheel whistle willow window wizard yarn
""")
