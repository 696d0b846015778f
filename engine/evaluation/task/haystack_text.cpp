// The text in which answers are hidden, written for kvlab. It contains no digits.
#include "engine/evaluation/task/sample.hpp"

namespace kvlab {

std::string_view bundled_haystack() {
  return R"(The canal was dug before anyone now living was born, and the town grew along it like moss along a gutter. Barges came down from the hills with slate and timber, and went back with flour, rope and the newspapers of the week before. The keeper of the upper lock was a tall woman who spoke little and noticed a great deal. She knew every boat by the sound of its engine, and most of the people aboard by the way they threw a line.

In spring the water rose and turned the colour of strong tea. Children were told to stay away from the sluices, and went there at once to see what was so dangerous. They found a heron that stood on one leg beneath the bridge and would not be hurried. It looked at them as a magistrate looks at small thieves, then went on fishing. By evening the bird was gone and the children were hungry, and nothing worse had happened to any of them.

The bakery stood where the towpath met the market road. Its oven was lit long before dawn, and the smell of it reached the sleepers in their cabins and made them dream of breakfast. The baker believed that bread could tell when it was being rushed. He had once refused to serve a mayor who tapped his fingers on the counter. People said he was proud, but they also said that his crusts sang when they cooled, and they queued in the rain to hear it.

Behind the bakery was a yard with a pear tree that had been struck by lightning twice. It bore fruit on one side only, small and hard until the first frost, and then sweet as honey. The pears belonged to nobody in particular, so everyone was careful with them. An old carpenter kept a ladder there for anyone who cared to climb. He had made chairs for half the town, and could tell which ones were his by running a thumb along the underside of the seat.

On market days the square filled with carts, and the noise was like a flock of geese arguing over a field. There were onions in plaits, cheeses wrapped in leaves, and baskets of eggs packed in straw. A man with a tame crow sold knives and scissors, and the crow sold nothing but took what it liked. The clockmaker closed his shop on those days because he could not hear his clocks. He walked along the water instead, with his hands behind him, and set his watch by the bells of the far church.

The schoolhouse had tall windows that faced the wrong way, so that in winter the lamps were lit by noon. The teacher had been a sailor and explained everything by ships. A sentence, he said, needs a keel or it falls over, and a sum should be stowed so that nothing slides about. His pupils drew maps of islands that did not exist and were asked what grew there, who ruled, and where the fresh water came from. Several of them became surveyors, and one became a poet and moved away.

There was a museum, too, in what had been the customs house. It kept a stuffed pike as long as a man, a wedding dress made of parachute silk, and a room of stones which nobody had ever labelled. Visitors were rare, and the attendant used the quiet to learn languages from old grammars. She could ask for a clean towel in the speech of countries she would never see. Once a traveller came in to shelter from the hail, and the two of them talked until closing time about the word for snow that has begun to melt.

When the railway arrived the barges were expected to vanish, and for some years they did. Weeds grew in the locks, and the lower basin was filled with rubble. Then people began to miss the slow boats, as one misses a neighbour who played the piano badly. A few young families bought hulls for the price of the iron and painted them green and red. They planted herbs on the roofs and tied bicycles to the rails, and the keeper of the upper lock opened the gates for them without a word.

The mill on the island had lost its wheel in a flood and had never been given another. Swallows nested in the hoist, and the miller's grandson used the loft to mend instruments. He had violins without necks, drums without skins, and an organ in so many parts that he had stopped counting. When the wind blew from the west the loose pipes sounded by themselves, and those who lived nearby said that the mill was thinking. Nobody complained, for it never thought after midnight.

Autumn brought fog that lay on the water until noon. The boats moved through it with lanterns at the bow, each one calling before the bends. It was the season for letters, and the post office stayed open late. The postmistress held that a letter should be carried for at least a day before it is sent, in case the writer has second thoughts. Many did, and she kept a drawer for them, which she never opened and never emptied. Some said that all the peace in the town was kept in that drawer.

The doctor kept bees on the roof of the hospital and gave a jar to every patient who went home. He said that it was good for the throat, and that it made people come back for the right reasons. From up there he could see the whole valley, the chimneys, the orchards and the road that climbed in loops toward the pass. In clear weather the mountains looked close enough to touch. In bad weather there was only the nearest roof and the sound of water going over the weir.

Winter was quiet and smelled of smoke. The canal froze along its edges first, then in the basins, and at last from bank to bank. Skaters came out with scarves and thermos flasks, and the man with the crow sharpened their blades. Someone always brought an accordion, and someone always fell. At dusk the lamps were lit along the towpath, the ice turned from white to blue, and the keeper walked home over the water that she had spent the whole year letting through.)";
}

}  // namespace kvlab
