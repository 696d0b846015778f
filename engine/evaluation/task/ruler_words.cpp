// Common English words, written for kvlab. Task data: a change of a word changes the prompts.
#include <iterator>
#include <sstream>
#include <string_view>

#include "engine/evaluation/task/ruler.hpp"

namespace kvlab {
namespace {

constexpr std::string_view kRulerNouns = R"(
acorn airport almond alphabet anchor animal answer apple apron arrow artist autumn bakery balcony ball
banana bank barn barrel basin basket bath beach beak bean bear beaver bed bee bell belt bench berry bicycle
bird biscuit blanket boat bone book boot bottle bowl box boy branch bread brick bridge broom brother brush
bucket bus butter button cabin cactus cake calendar camel camera candle canoe canyon carpet carrot castle
cat cave cellar chair chalk chapter cheese cherry chess chicken chimney church circle circus city clock
cloth cloud clover coach coal coast coat coconut coffee coin comb copper corn cotton couch cousin cow crab
cradle crayon cream crow crown cup curtain cushion daisy dam daughter deer desert desk diamond dinner doctor
dog doll donkey door dove dragon drawer dream dress drum duck eagle ear earth egg elbow elephant engine
envelope evening eye face factory family farm farmer feast feather fence fern ferry field finger fire fish
flag flame flood floor flour flower flute fog foot forest fork fossil fountain fox frog fruit garden garlic
gate ghost gift giraffe girl glacier glass glove goat gold goose grape grass gravel guitar hail hair hammer
hand harbor harp hat hawk hay head heart hedge helmet hen hill honey hook horn horse hospital hotel house
ice island ivory jacket jam jar jewel jungle kettle key kitchen kite kitten knee knife lake lamb lamp
lantern laundry lawn leaf leather lemon leopard letter library lighthouse lily lion lizard lobster lock
lumber magnet mail mango map maple marble market mask meadow medal melon metal milk mill mint mirror mitten
monkey moon moss moth mother motor mountain mouse mouth mud mushroom music mustard nail napkin neck needle
nest net night nose notebook nurse nut oak oar oasis ocean office olive onion orange orchard organ ostrich
otter oven owl ox oyster paddle page paint palace panda paper parade parcel park parrot pasture path peach
peacock pear pebble pencil penguin pepper piano picnic picture pie pigeon pillow pilot pine pipe planet
plate plum pocket poem pond pony poppy porch potato pumpkin puppet purse puzzle quarry queen quilt rabbit
radio raft rail rain raisin ranch raven ribbon rice ring river road roof room rooster root rope rose ruler
saddle sail salad salmon salt sand sandal scarf school scissors sea seal season seed shadow shark sheep
shell shelf ship shirt shoe shovel silk silver sink sister skate sky sled snail snow soap sock sofa soldier
soup spade spider spoon spring square squirrel stable stamp star station statue steam stone stool storm
stove straw stream street string sugar suitcase summer sun swan table tailor teacher teapot tent theater
thistle thread throne thumb thunder ticket tiger timber toast tomato tooth tower town toy tractor train
tray treasure tree truck trumpet tulip tunnel turkey turtle uncle valley vase vest village vine violin
voyage wagon walnut water wave wax whale wheat wheel whistle willow wind window wing winter wolf wood wool
yard zebra)";

constexpr std::string_view kRulerAdjectives = R"(
able absent active actual afraid ample ancient angry awake aware bald basic bitter blank blind bold brave
brief bright broad broken brown busy calm careful cheap cheerful chilly clean clear clever coarse cold
common complex cool crisp crooked cruel curious curly damp dark dear deep dense dim distant dizzy dry dull
dusty eager early easy elegant empty entire equal exact faint fair faithful famous fancy fast fierce final
firm flat foggy fond foolish formal fragile free fresh friendly frosty full funny generous gentle giant glad
gloomy golden good grand grave gray great greedy green handy happy hard harsh healthy heavy helpful hidden
hollow honest hot huge humble hungry icy idle immense innocent jagged jolly joyful keen kind large late lazy
lively lonely long loose loud loyal lucky mellow merry mild misty modern modest moist muddy narrow neat new
nimble noble noisy odd old opposite painted pale patient plain pleasant polite poor precious pretty private
proper proud pure purple quick quiet rapid rare raw ready remote rich ripe rough round royal rusty sacred sad
safe salty secret serious shallow sharp shiny short shy silent simple sleepy slender slow small smooth soft
solid sour special steep stiff strange strict strong sturdy sudden sunny sweet swift tall tame tender thick
thin thirsty tidy tight tiny tired tough usual vast vivid warm weak weary wet white wide wild wise wooden
worthy yellow young)";

constexpr std::string_view kRulerVerbs = R"(
accept add agree allow appear argue arrive ask attach avoid bake become beg begin behave believe belong bend
blow boil borrow bounce bow breathe bring build burn buy call carry carve catch cause chase cheer choose
climb close collect compare complain consider contain cook copy cough count crawl create cross cry cut dance
decide deliver depend describe dig discover divide draw drink drive drop earn eat enjoy enter escape examine
expect explain fall feed feel fetch fill find finish float flow fly fold follow forget forgive freeze gather
give glow greet grind grow guess guide happen hear help hide hold hope hurry imagine improve invent invite
join juggle jump keep kick kneel knit knock know laugh lead lean learn leave lend lift listen live look lose
love make march measure meet melt mend mix move notice obey offer open owe pack pass pause pay peel perform
pick plan plant play point polish pour praise prefer prepare pretend promise protect pull push reach read
receive remember repair repeat reply rescue rest return ride rise roll row run say scatter scrub search see
sell send settle sew shake share shine shout show sing sit sleep slide smile sneeze solve speak spend spill
spin stand stay steal stretch study swim swing take talk taste teach tear tell think throw tie touch travel
trust try turn understand unite visit wait wake walk wander want wash watch wear weave weigh whisper win wish
wonder work worry wrap write yawn)";

std::vector<std::string> words_in(std::string_view text) {
  std::istringstream in{std::string(text)};
  return {std::istream_iterator<std::string>(in), {}};
}

}  // namespace

WordLists bundled_word_lists() {
  return {words_in(kRulerNouns), words_in(kRulerAdjectives), words_in(kRulerVerbs)};
}

}  // namespace kvlab
